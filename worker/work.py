"""The loop of a worker: take tickets, claim a batch, run it, again."""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy.exc import SQLAlchemyError

from common import telemetry
from common.domain.tickets import Ticket
from common.events import JobChanged
from worker import canary
from worker.attempts import Attempt
from worker.batching import choose_batch
from worker.breaker import Breaker
from worker.claim import Intent, claim, claimed_already, defer, give_back, intend
from worker.conclude import release
from worker.connections import Connections
from worker.consume import Delivery, TicketConsumer
from worker.deliver import DeliveryLane
from worker.direct import DirectClaims
from worker.drain import Drain
from worker.engine.process import EngineError, EngineProcess
from worker.execute import BatchRun, Surroundings
from worker.heartbeat import Heartbeat
from worker.pace import Pace
from worker.spool import has_room

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
    direct: DirectClaims
    engine: EngineProcess
    heartbeat: Heartbeat
    lane: DeliveryLane
    drain: Drain
    breaker: Breaker
    pace: Pace


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
        telemetry.breaker_open.labels(settings.model).set(worker.breaker.is_open)
        if not ready:
            worker.consumer.pause()
            if worker.breaker.canary_is_due:
                _try_canary(worker)
            worker.drain.requested.wait(_TURN_S)
            continue
        if not worker.engine.alive:
            worker.engine.start(settings.load_timeout_s)
        _take_and_run(worker)


def is_ready(worker: Worker) -> bool:
    """Whether new work may be taken.

    Postgres hears this worker, its results do not pile up undelivered, its disk has room, and it does not fail job
    after job.
    """
    connections, settings = worker.connections, worker.connections.settings
    return (
        worker.heartbeat.trusted
        and not worker.breaker.is_open
        and not worker.lane.disk_full
        and len(connections.active.snapshot()) < settings.spool_jobs
        and has_room(connections.spool, settings.spool_bytes, settings.spool_free_bytes)
    )


def _try_canary(worker: Worker) -> None:
    if not worker.engine.alive:
        worker.engine.start(worker.connections.settings.load_timeout_s)
    worker.breaker.note_canary(passed=canary.passes(worker.engine, worker.connections.settings))


def _take_and_run(worker: Worker) -> None:
    """Run a batch of the tickets that come, or, while the broker is away, of what Postgres has."""
    settings = worker.connections.settings
    worker.consumer.resume()
    held = worker.consumer.take(settings.max_batch, settings.batch_wait_s, _TURN_S)
    if held:
        worker.consumer.pause()
        held += worker.consumer.take(settings.max_batch, 0.0, 0.0)
        if worker.engine.alive:
            run_batch(worker, held)
        else:  # it died while idle: a new one may take minutes to load, and the jobs need not wait for that
            _return(worker, [delivery.ticket for delivery in held], held)
    elif worker.consumer.away_s > settings.direct_claim_after_s and worker.engine.alive:
        run_direct(worker)


def run_batch(worker: Worker, held: list[Delivery]) -> None:
    """Claim a batch of what is in hand, give the rest back, and run the batch to its end."""
    settings = worker.connections.settings
    choice = choose_batch([delivery.ticket for delivery in held], settings.max_batch)
    intent = intend(choice.batch)
    attempts = _claim(worker, intent)
    if attempts is None:
        return  # draining, and nothing is claimed: the tickets go back with the channel
    _defer_unclaimed(worker, choice.batch, attempts)
    _return(worker, choice.rest, held)
    telemetry.ticket_noops.labels(settings.model).inc(len(choice.batch) - len(attempts))
    _announce_and_run(worker, intent, attempts)


def run_direct(worker: Worker) -> None:
    """Claim a batch of what Postgres has, without tickets, and run it to its end.

    Tickets of these jobs that lie in the broker will find nothing. What is released here and does not fit is taken
    back, so that whoever comes next finds it.
    """
    settings = worker.connections.settings
    released, own = worker.direct.look()
    if not released and not own:
        return
    worker.consumer.pause()
    if held := worker.consumer.take(settings.max_batch, 0.0, 0.0):  # the broker came back just now
        _return(worker, own, ())
        run_batch(worker, held)
        return
    choice = choose_batch([*released, *own], settings.max_batch)
    _return(worker, [ticket for ticket in own if ticket not in choice.batch], ())
    intent = intend(choice.batch)
    attempts = _claim(worker, intent)
    if attempts is None:
        _return(worker, own, ())
        return
    _defer_unclaimed(worker, choice.batch, attempts)
    worker.direct.note(claimed=bool(attempts))
    telemetry.claims_direct.labels(settings.model).inc(len(attempts))
    _announce_and_run(worker, intent, attempts)


def _announce_and_run(worker: Worker, intent: Intent, attempts: list[Attempt]) -> None:
    if attempts:
        _announce(worker, attempts)
        _run(worker, intent, attempts)


def _defer_unclaimed(worker: Worker, asked: Sequence[Ticket], attempts: Sequence[Attempt]) -> None:
    """Some of these may be for another worker to try: send them again, or they would stay released without a ticket."""
    claimed = {attempt.job_id for attempt in attempts}
    tickets = [ticket for ticket in asked if ticket.job_id not in claimed]
    try:
        defer(worker.connections.database, tickets)
    except SQLAlchemyError as error:  # then the dispatcher will miss the tickets
        log.warning("defer_failed", jobs=len(tickets), error=type(error).__name__)


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

    around = Surroundings(
        connections=worker.connections,
        lane=worker.lane,
        pace=worker.pace,
        breaker=worker.breaker,
        on_decode=device_nearly_free,
        left_s=lambda: worker.drain.left_s,
    )
    try:
        BatchRun(around, attempts).run(worker.engine, intent.batch_id)
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
