"""Sends tickets for waiting jobs, fairly between tenants, while the model's window has room."""

import json
from collections.abc import Sequence
from typing import Any

import structlog
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from common import telemetry
from common.broker.publisher import Publisher
from common.db.readings import MODEL_LOAD, ROOMS, SERVICE_RATE
from common.db.statements import DEFAULT_WINDOW, RELEASE, TAKE_BACK
from common.db.upkeep import SET_WINDOW
from common.domain.tickets import Ticket

# Three missed heartbeats: such a worker's capacity no longer counts.
WORKER_SILENCE_S = 30
# Without a bound the backlog is sent in portions, so that one statement and one round of confirms stay short.
_PORTION = 500
_CONFIRM_TIMEOUT_S = 5.0

log = structlog.get_logger()


def window_for(capacity: int, configured: int | None) -> int | None:
    """Tickets that may be out for a model whose live workers take `capacity` jobs at once. None means no bound.

    Twice the capacity keeps every worker's next batch ready; what is out can no longer be reordered or shared fairly.
    """
    if configured == 0:
        return None
    return configured or max(DEFAULT_WINDOW, 2 * capacity)


async def refresh_windows(engine: AsyncEngine, configured: int | None) -> None:
    """Set every model's window by the workers that live now, and show how the queues stand."""
    async with engine.connect() as connection:
        loads = (await connection.execute(MODEL_LOAD, {"worker_silence_s": WORKER_SILENCE_S})).all()
        rates = {row.model: row.jobs_per_s for row in (await connection.execute(SERVICE_RATE)).all()}
        for load in loads:
            size = window_for(load.capacity, configured)
            # Without a worker the pace of the past promises nothing.
            pace = rates.get(load.model) if load.capacity else None
            values = {"model": load.model, "size": size, "jobs_per_s": pace}
            await connection.execute(SET_WINDOW, values)
            _show(load, size)


async def release_backlog(engine: AsyncEngine, publisher: Publisher) -> None:
    """Fill each window that has room with the next jobs of its model."""
    if not publisher.connected:
        return  # a release would only be taken back again
    async with engine.connect() as connection:
        for row in (await connection.execute(ROOMS)).all():
            room = _PORTION if row.room is None else min(row.room, _PORTION)
            if room > 0:
                await _release(connection, publisher, row.model, room)


async def _release(connection: AsyncConnection, publisher: Publisher, model: str, room: int) -> None:
    rows = (await connection.execute(RELEASE, {"model": model, "room": room})).all()
    tickets = [Ticket(row.id, row.dispatch_seq, row.model, row.batch_key) for row in rows]
    sent = await publisher.publish(tickets, _CONFIRM_TIMEOUT_S)
    unsent = [ticket for ticket, ok in zip(tickets, sent, strict=True) if not ok]
    if unsent:
        await take_back(connection, [(str(ticket.job_id), ticket.dispatch_seq) for ticket in unsent])
    telemetry.released.labels(model).inc(len(tickets) - len(unsent))


async def take_back(connection: AsyncConnection, releases: Sequence[tuple[str, int]]) -> int:
    """Undo these (job id, dispatch_seq) where they are still the job's last; how many that was."""
    rows = json.dumps([{"id": job_id, "dispatch_seq": seq} for job_id, seq in releases])
    return len((await connection.execute(TAKE_BACK, {"rows": rows})).all())


def forget_figures() -> None:
    """Show nothing of the queues any more: another dispatcher leads and shows them."""
    for gauge in (telemetry.queued, telemetry.oldest_queued, telemetry.window_size):
        gauge.clear()


def _show(load: Row[Any], size: int | None) -> None:
    telemetry.queued.labels(load.model, "yes").set(load.released)
    telemetry.queued.labels(load.model, "no").set(load.waiting)
    telemetry.oldest_queued.labels(load.model).set(load.oldest_s or 0)
    telemetry.window_size.labels(load.model).set(-1 if size is None else size)
