"""The dispatcher process: wiring and its loops (lead, windows, release, scan)."""

import asyncio
import os
import random
import signal
import socket
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from common.broker.publisher import Publisher
from common.db.sessions import async_engine
from common.db.upkeep import FORGET_WORKERS, NOTE_SCAN
from common.domain.profiles import PROFILES
from common.events import AsyncEvents
from common.settings import DispatcherSettings, read
from common.telemetry import configure_logging, serve_metrics
from dispatcher.expire import expire_jobs
from dispatcher.lead import ROLE, Leadership
from dispatcher.reap import LostTickets, reap_leases
from dispatcher.release import forget_figures, refresh_windows, release_backlog

# A retry that is due, or the next job of a window that has emptied, waits this long at most.
_RELEASE_EVERY_S = 0.25
# New workers and models are seen within this.
_WINDOWS_EVERY_S = 1.0
# A lost job is found within its lease and this.
_SCAN_EVERY_S = 2.0

log = structlog.get_logger()


async def run(settings: DispatcherSettings) -> None:
    """Run until SIGTERM or SIGINT."""
    holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
    engine = async_engine(settings, pool_size=5)
    publisher = Publisher(settings.amqp_url.get_secret_value(), f"dispatcher {holder}", list(PROFILES))
    events = AsyncEvents(settings.redis_url.get_secret_value())
    lead = Leadership(engine, holder, settings.leader_lease_s)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    lost = LostTickets(settings.ticket_lost_after_s, settings.ticket_recheck_s)
    loops: list[Coroutine[Any, Any, None]] = [
        publisher.run(),
        _renew(lead, settings.leader_lease_s / 3),
        _repeat(lead, _WINDOWS_EVERY_S, lambda: refresh_windows(engine, settings.dispatch_window)),
        _repeat(lead, _RELEASE_EVERY_S, lambda: release_backlog(engine, publisher)),
        _repeat(lead, _SCAN_EVERY_S, _scanner(settings, engine, events)),
        # Of its own, since a broker that hangs must not keep lost workers from being noticed.
        _repeat(lead, _SCAN_EVERY_S, lambda: lost.scan(engine, publisher, list(PROFILES))),
        _stop_on_signal(stop),
    ]
    try:
        await _until_first_ends(loops)
    finally:
        await lead.step_down()
        await events.close()
        await engine.dispose()


async def _stop_on_signal(stop: asyncio.Event) -> None:
    await stop.wait()


async def _until_first_ends(loops: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run until one ends: the signal's, or one that failed, whose exception ends the process for a fresh one."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    ended, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for task in ended:
        task.result()


def _scanner(settings: DispatcherSettings, engine: AsyncEngine, events: AsyncEvents) -> Callable[[], Awaitable[None]]:
    jitter = random.Random()  # noqa: S311  spreads retries, guards nothing

    async def scan() -> None:
        values = {"role": ROLE, "gap_s": settings.scan_gap_s, "lease_s": settings.lease_s}
        async with engine.connect() as connection:
            warming_up = (await connection.execute(NOTE_SCAN, values)).scalar_one()
            await connection.execute(FORGET_WORKERS)
        if not warming_up:
            await reap_leases(engine, events, jitter)
            await expire_jobs(engine, events, settings.deadline_backstop_s)

    return scan


async def _renew(lead: Leadership, every_s: float) -> None:
    led = False
    while True:
        await lead.renew()
        if led and not lead.held:
            forget_figures()
        led = lead.held
        await asyncio.sleep(every_s)


async def _repeat(lead: Leadership, every_s: float, action: Callable[[], Awaitable[None]]) -> None:
    while True:
        if lead.held:
            try:
                await action()
            except Exception:  # the edge of the loop: whatever failed is tried again, and must not end the loop
                log.exception("round_failed")
                await asyncio.sleep(1.0)
        await asyncio.sleep(every_s)


def main() -> None:
    """Entry point."""
    configure_logging("dispatcher")
    settings = read(DispatcherSettings)
    serve_metrics("dispatcher", settings.metrics_host, settings.metrics_port)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
