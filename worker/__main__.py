"""The worker process: wiring."""

import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from common import telemetry
from common.db.sessions import sync_engine
from common.events import EventSender
from common.settings import WorkerSettings, read
from common.storage import client
from worker.adopt import adopt_spool
from worker.attempts import ActiveAttempts
from worker.breaker import Breaker
from worker.claim_gpu import GpuClaimError, choices, claim_gpu
from worker.connections import Connections
from worker.consume import TicketConsumer
from worker.deliver import DeliveryLane
from worker.direct import DirectClaims
from worker.drain import Drain
from worker.engine.base import Capabilities, EngineConfig
from worker.engine.process import EngineProcess, EngineStartError
from worker.gpu import NoGpuError, gpu_uuids, watch_gpus
from worker.heartbeat import Heartbeat
from worker.pace import Pace
from worker.spool import SpoolTakenError, open_spool
from worker.work import Worker, leave, work

log = structlog.get_logger()


def build(
    settings: WorkerSettings, capabilities: Capabilities, engine: EngineProcess, worker_id: str, spool: Path
) -> Worker:
    """Wire everything up; nothing runs yet."""
    connections = Connections(
        settings=settings,
        worker_id=worker_id,
        spool=spool,
        database=sync_engine(settings, settings.database_connections),
        s3=client(settings),
        events=EventSender(settings.redis_url.get_secret_value()),
        active=ActiveAttempts(),
        closing=threading.Event(),
    )
    breaker = Breaker()
    return Worker(
        connections=connections,
        consumer=TicketConsumer(settings.amqp_url.get_secret_value(), settings.model, settings.max_batch, worker_id),
        direct=DirectClaims(connections.database, settings.model, settings.max_batch),
        engine=engine,
        heartbeat=_heartbeat(connections, capabilities, engine),
        lane=DeliveryLane(connections, breaker, _engine_facts(capabilities)),
        drain=Drain(settings.drain_grace_s),
        breaker=breaker,
        pace=Pace(),
    )


def _heartbeat(connections: Connections, capabilities: Capabilities, engine: EngineProcess) -> Heartbeat:
    settings = connections.settings
    presence: dict[str, object] = {
        "id": connections.worker_id,
        "model": settings.model,
        "engine": capabilities.engine,
        "max_batch": settings.max_batch,
    }
    return Heartbeat(
        connections.database,
        connections.active,
        presence,
        engine.cancel,
        lease_s=settings.lease_s,
        every_s=settings.heartbeat_s,
    )


def _engine_facts(capabilities: Capabilities) -> dict[str, Any]:
    facts = dataclasses.asdict(capabilities)
    return {name: facts[name] for name in ("engine", "device", "versions")}


def serve(worker: Worker) -> int:
    """Run until drained; the exit code. Results under way are delivered first."""

    def on_request() -> None:
        worker.heartbeat.accept(accepting=False)
        worker.consumer.stop()

    def give_up() -> None:
        worker.engine.interrupt()
        worker.connections.closing.set()

    worker.drain.install(on_request, give_up)
    # Before the first beat, which renews the leases of what is adopted, and before anything new is taken.
    adopt_spool(worker.connections, worker.lane, worker.drain.requested.wait)
    worker.heartbeat.start()
    worker.heartbeat.listen_for_cancels(worker.connections.events)
    worker.consumer.start()
    # Only now, since answering /metrics means that this worker serves.
    settings = worker.connections.settings
    telemetry.serve_metrics("worker", settings.metrics_host, settings.metrics_port)
    watch_gpus(worker.connections.closing)
    try:
        work(worker)
        code = 0
    except Exception:  # the edge of the process: whatever it was, a fresh one takes over
        log.exception("worker_failed")
        worker.connections.closing.set()
        code = 1
    leave(worker)
    log.info("worker_left", code=code)
    return code


def start_engine(settings: WorkerSettings) -> tuple[EngineProcess, Capabilities]:
    """Load the model. Raises EngineStartError."""
    engine = EngineProcess(
        EngineConfig(
            engine=settings.engine,
            model=settings.model,
            model_path=settings.model_path,
            max_batch=settings.max_batch,
            threads=settings.threads,
            synthetic_step_s=settings.synthetic_step_s,
            synthetic_markers=settings.synthetic_markers,
        )
    )
    started = time.monotonic()
    capabilities = engine.start(settings.load_timeout_s)
    log.info("engine_ready", seconds=round(time.monotonic() - started, 2), plan=capabilities.plan)
    return engine, capabilities


@contextmanager
def own_gpu(settings: WorkerSettings) -> Iterator[str]:
    """The GPU of this worker, or what CUDA_VISIBLE_DEVICES names. Raises NoGpuError and GpuClaimError."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if settings.gpu == "auto":
        with claim_gpu(choices(gpu_uuids(), visible), settings.gpu_lock_dir) as uuid:
            yield uuid
    else:
        yield visible or "0"


def main() -> int:
    """Entry point."""
    telemetry.configure_logging("worker")
    settings = read(WorkerSettings)
    try:
        with own_gpu(settings) as gpu:
            worker_id = settings.worker_id or f"{socket.gethostname()}:{gpu}"
            with open_spool(settings.spool_dir, worker_id) as spool:
                engine, capabilities = start_engine(settings)
                return serve(build(settings, capabilities, engine, worker_id, spool))
    except (NoGpuError, GpuClaimError, EngineStartError, SpoolTakenError) as error:
        log.error("worker_would_not_start", reason=str(error))  # noqa: TRY400  the message says it all
        return 1


if __name__ == "__main__":
    _code = main()
    logging.shutdown()
    # Everything that can be delivered is. The interpreter would wait for threads that a dead network may hold.
    os._exit(_code)
