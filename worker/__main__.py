"""The worker process: wiring, and the loop that takes tickets, claims a batch and runs it."""

import dataclasses
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError

from common import telemetry
from common.db.sessions import sync_engine
from common.domain.tickets import Ticket
from common.events import EventSender, JobChanged
from common.settings import WorkerSettings
from common.storage import client
from worker.attempts import ActiveAttempts, Attempt
from worker.batching import choose_batch
from worker.claim import claim, give_back, make_tokens
from worker.connections import Connections
from worker.consume import Delivery, TicketConsumer
from worker.deliver import DeliveryLane, empty_spool
from worker.drain import Drain
from worker.engine.base import Capabilities, EngineConfig
from worker.engine.process import EngineError, EngineProcess, EngineStartError
from worker.execute import BatchRun
from worker.gpu import watch_gpus
from worker.heartbeat import Heartbeat

# How long the loop waits for a ticket before it looks at everything else, a drain above all.
_TURN_S = 0.5
# Main, heartbeat, one a delivery; a thread waits for a connection rather than failing.
_DATABASE_CONNECTIONS = 8

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Worker:
    """Everything that one worker process consists of."""

    connections: Connections
    consumer: TicketConsumer
    engine: EngineProcess
    heartbeat: Heartbeat
    lane: DeliveryLane
    drain: Drain


def work(worker: Worker) -> None:
    """Take and run batches until a drain is requested. Raises EngineStartError when no new child will start."""
    while not worker.drain.requested.is_set():
        telemetry.worker_up.labels(worker.connections.settings.model).set(worker.heartbeat.trusted)
        if not worker.heartbeat.trusted:
            worker.consumer.pause()
            worker.drain.requested.wait(_TURN_S)
            continue
        worker.consumer.resume()
        settings = worker.connections.settings
        held = worker.consumer.take(settings.max_batch, settings.batch_wait_s, _TURN_S)
        if held:
            worker.consumer.pause()
            held += worker.consumer.take(settings.max_batch, 0.0, 0.0)
            _run(worker, held)


def _run(worker: Worker, held: list[Delivery]) -> None:
    batch_id = uuid.uuid4()
    attempts = _claim(worker, held, batch_id)
    if not attempts:
        return
    settings = worker.connections.settings
    worker.connections.active.add(attempts)
    for attempt in attempts:
        telemetry.queue_wait.labels(settings.model).observe(attempt.waited_s)
        worker.connections.events.send(JobChanged(str(attempt.job_id), str(attempt.tenant_id), attempt.version))
    telemetry.batch_size.labels(settings.model).observe(len(attempts))
    telemetry.batch_fill.labels(settings.model).observe(len(attempts) / settings.max_batch)
    try:
        BatchRun(worker.connections, worker.lane, attempts).run(worker.engine, batch_id, worker.consumer.resume)
    except EngineError:
        log.warning("engine_restarting")
    if not worker.engine.alive:
        worker.engine.start(settings.load_timeout_s)


def _claim(worker: Worker, held: list[Delivery], batch_id: uuid.UUID) -> list[Attempt]:
    """Claim a batch of what is in hand, give back the rest, acknowledge all. Waits while Postgres is away."""
    settings = worker.connections.settings
    choice = choose_batch([delivery.ticket for delivery in held], settings.max_batch)
    tokens = make_tokens(choice.batch)
    database = worker.connections.database
    while not worker.drain.requested.is_set():
        try:
            attempts = claim(database, tokens, worker.connections.worker_id, batch_id, settings.lease_s)
        except SQLAlchemyError as error:
            log.warning("claim_failed", error=type(error).__name__)
            worker.drain.requested.wait(1.0)
            continue
        _give_back(worker, choice.rest)
        worker.consumer.acknowledge(held)
        telemetry.ticket_noops.labels(settings.model).inc(len(tokens) - len(attempts))
        return attempts
    return []


def _give_back(worker: Worker, tickets: Sequence[Ticket]) -> None:
    try:
        give_back(worker.connections.database, tickets)
    except SQLAlchemyError as error:  # then the dispatcher will miss the tickets and send them again
        log.warning("give_back_failed", jobs=len(tickets), error=type(error).__name__)


def build(settings: WorkerSettings, capabilities: Capabilities, engine: EngineProcess) -> Worker:
    """Wire everything up; nothing runs yet."""
    worker_id = settings.worker_id or f"{socket.gethostname()}:{os.environ.get('CUDA_VISIBLE_DEVICES', '0')}"
    connections = Connections(
        settings=settings,
        worker_id=worker_id,
        database=sync_engine(settings, _DATABASE_CONNECTIONS),
        s3=client(settings),
        events=EventSender(settings.redis_url.get_secret_value()),
        active=ActiveAttempts(),
        closing=threading.Event(),
    )
    presence: dict[str, object] = {
        "id": worker_id,
        "model": settings.model,
        "engine": capabilities.engine,
        "max_batch": settings.max_batch,
    }
    return Worker(
        connections=connections,
        consumer=TicketConsumer(settings.amqp_url.get_secret_value(), settings.model, settings.max_batch, worker_id),
        engine=engine,
        heartbeat=Heartbeat(
            connections.database,
            connections.active,
            presence,
            engine.cancel,
            lease_s=settings.lease_s,
            every_s=settings.heartbeat_s,
        ),
        lane=DeliveryLane(connections, _engine_facts(capabilities)),
        drain=Drain(settings.drain_grace_s),
    )


def _engine_facts(capabilities: Capabilities) -> dict[str, Any]:
    facts = dataclasses.asdict(capabilities)
    return {name: facts[name] for name in ("engine", "device", "versions")}


def serve(worker: Worker) -> int:
    """Run until drained; the exit code. Results under way are delivered first."""
    worker.drain.install(worker.engine, worker.heartbeat.stop_accepting)
    worker.heartbeat.start()
    worker.heartbeat.listen_for_cancels(worker.connections.events)
    worker.consumer.start()
    watch_gpus(worker.connections.closing)
    code = 0
    try:
        work(worker)
    except EngineStartError as error:
        log.error("engine_would_not_start_again", detail=str(error))  # noqa: TRY400  the message says it all
        code = 1
        worker.heartbeat.stop_accepting()
    worker.consumer.stop()
    worker.lane.close()
    worker.connections.closing.set()
    worker.heartbeat.stop()
    worker.connections.events.close()
    worker.engine.stop(grace_s=5.0)
    log.info("worker_left", code=code)
    return code


def main() -> int:
    """Entry point."""
    telemetry.configure_logging("worker")
    settings = WorkerSettings()  # type: ignore[call-arg]  # read from the environment
    empty_spool(settings.spool_dir)
    engine = EngineProcess(
        EngineConfig(
            engine=settings.engine,
            model=settings.model,
            model_path=settings.model_path,
            max_batch=settings.max_batch,
            threads=settings.threads,
            synthetic_step_s=settings.synthetic_step_s,
        )
    )
    started = time.monotonic()
    try:
        capabilities = engine.start(settings.load_timeout_s)
    except EngineStartError as error:
        log.error("engine_would_not_start", detail=str(error))  # noqa: TRY400  the message says it all
        return 1
    log.info("engine_ready", seconds=round(time.monotonic() - started, 2), plan=capabilities.plan)
    telemetry.serve_metrics(settings.metrics_host, settings.metrics_port)
    return serve(build(settings, capabilities, engine))


if __name__ == "__main__":
    sys.exit(main())
