"""The loop of a worker: take tickets, claim a batch, run it, again."""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import SQLAlchemyError

from common import telemetry
from common.domain.tickets import Ticket
from common.events import JobChanged
from worker.attempts import Attempt
from worker.batching import choose_batch
from worker.claim import Intent, claim, claimed_already, give_back, intend
from worker.conclude import release
from worker.connections import Connections
from worker.consume import Delivery, TicketConsumer
from worker.deliver import DeliveryLane
from worker.drain import Drain
from worker.engine.process import EngineError, EngineProcess
from worker.execute import BatchRun
from worker.heartbeat import Heartbeat

# How long the loop waits for a ticket before it looks at everything else, a drain above all.
_TURN_S = 0.5
# Between two tries of a claim while Postgres is away.
_CLAIM_AGAIN_S = 1.0

log = structlog.get_logger()


class PartDiedError(RuntimeError):
    """A thread that must not end has ended. A fresh process is better than one that looks alive and does nothing."""


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
    """Take and run batches until a drain is requested.

    Raises EngineStartError when no new engine child will start, and PartDiedError.
    """
    settings = worker.connections.settings
    while not worker.drain.requested.is_set():
        if not (worker.consumer.alive and worker.heartbeat.alive):
            msg = "the consumer's or the heartbeat's thread has ended"
            raise PartDiedError(msg)
        ready = is_ready(worker)
        worker.heartbeat.accept(accepting=ready)
        telemetry.worker_up.labels(settings.model).set(ready)
        if not ready:
            worker.consumer.pause()
            worker.drain.requested.wait(_TURN_S)
            continue
        if not worker.engine.alive:
            worker.engine.start(settings.load_timeout_s)
        worker.consumer.resume()
        held = worker.consumer.take(settings.max_batch, settings.batch_wait_s, _TURN_S)
        if held:
            worker.consumer.pause()
            held += worker.consumer.take(settings.max_batch, 0.0, 0.0)
            if worker.engine.alive:
                run_batch(worker, held)
            else:  # it died while idle: a new one may take minutes to load, and the jobs need not wait for that
                _return(worker, [delivery.ticket for delivery in held], held)


def is_ready(worker: Worker) -> bool:
    """Whether new work may be taken: Postgres hears this worker, and its results do not pile up undelivered."""
    undelivered = len(worker.connections.active.snapshot())
    return worker.heartbeat.trusted and undelivered < worker.connections.settings.spool_jobs


def run_batch(worker: Worker, held: list[Delivery]) -> None:
    """Claim a batch of what is in hand, give the rest back, and run the batch to its end."""
    settings = worker.connections.settings
    choice = choose_batch([delivery.ticket for delivery in held], settings.max_batch)
    intent = intend(choice.batch)
    attempts = _claim(worker, intent)
    if attempts is None:
        return  # draining, and nothing is claimed: the tickets go back with the channel
    _return(worker, choice.rest, held)
    telemetry.ticket_noops.labels(settings.model).inc(len(choice.batch) - len(attempts))
    if attempts:
        _announce(worker, attempts)
        _run(worker, intent, attempts)


def _claim(worker: Worker, intent: Intent) -> list[Attempt] | None:
    """Claim, however long Postgres is away. None when the worker must leave before that was possible."""
    settings, database = worker.connections.settings, worker.connections.database
    again = False
    while not worker.drain.requested.is_set():
        try:
            before = claimed_already(database, intent) if again else []
            attempts = before + claim(database, intent, worker.connections.worker_id, settings.lease_s)
        except SQLAlchemyError as error:
            log.warning("claim_failed", error=type(error).__name__)
            again = True
            worker.drain.requested.wait(_CLAIM_AGAIN_S)
            continue
        worker.connections.active.add(attempts)
        return attempts
    return None


def _return(worker: Worker, tickets: Sequence[Ticket], held: Sequence[Delivery]) -> None:
    """Let the dispatcher send these tickets again, and tell the broker that all in hand are dealt with."""
    try:
        give_back(worker.connections.database, tickets)
    except SQLAlchemyError as error:  # then the dispatcher will miss the tickets and send them again
        log.warning("give_back_failed", jobs=len(tickets), error=type(error).__name__)
    worker.consumer.acknowledge(held)


def _announce(worker: Worker, attempts: Sequence[Attempt]) -> None:
    settings = worker.connections.settings
    for attempt in attempts:
        if attempt.attempt == 1:  # a later one has run before, and that was no waiting
            telemetry.queue_wait.labels(settings.model).observe(attempt.waited_s)
        worker.connections.events.send(JobChanged(str(attempt.job_id), str(attempt.tenant_id), attempt.version))
    telemetry.batch_size.labels(settings.model).observe(len(attempts))
    telemetry.batch_fill.labels(settings.model).observe(len(attempts) / settings.max_batch)


def _run(worker: Worker, intent: Intent, attempts: list[Attempt]) -> None:
    def device_nearly_free() -> None:
        if not worker.drain.requested.is_set():
            worker.consumer.resume()

    try:
        BatchRun(worker.connections, worker.lane, attempts).run(worker.engine, intent.batch_id, device_nearly_free)
    except EngineError as error:
        log.warning("engine_will_be_replaced", error=type(error).__name__)


def leave(worker: Worker) -> None:
    """Deliver what is under way and say goodbye. Whoever cannot be told finds out by the leases."""
    worker.heartbeat.accept(accepting=False)
    worker.consumer.stop()
    for attempt in worker.connections.active.snapshot():
        if attempt.in_engine:
            release(worker.connections, attempt, "preempted")
    worker.lane.close()
    worker.drain.finished.set()
    worker.connections.closing.set()
    worker.heartbeat.stop()
    worker.connections.events.close()
    worker.engine.stop(grace_s=5.0)
