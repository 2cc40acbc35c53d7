"""What the routes of one process share, built from the settings and kept running beside the server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.requests import HTTPConnection

from api.announce import Announcer
from api.auth import KeyRing
from api.hub import Hub
from api.reads import JobReads
from api.render import Sign
from api.submit import Submitter
from common.broker.publisher import Publisher
from common.db.sessions import async_engine
from common.domain.profiles import PROFILES
from common.events import AsyncEvents
from common.settings import ApiSettings
from common.storage import presigner
from common.urls import UrlSigner

# Four readers, two for lists, and some for keys and cancels. Two processes stay well under Postgres' 100.
_CONNECTIONS = 10
# One for each flusher, in a pool of their own: no reader can hold up a submit.
_SUBMIT_CONNECTIONS = 2
# A loop that failed for a reason nobody foresaw is started again after this pause.
_RESTART_S = 1.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Resources:
    """Everything a route may need."""

    settings: ApiSettings
    engine: AsyncEngine
    submit_engine: AsyncEngine
    sign: Sign
    publisher: Publisher
    events: AsyncEvents
    announcer: Announcer
    keys: KeyRing
    reads: JobReads
    hub: Hub
    submitter: Submitter


def build(settings: ApiSettings) -> Resources:
    """Build everything; nothing is connected yet."""
    engine = async_engine(settings, _CONNECTIONS)
    submit_engine = async_engine(settings, _SUBMIT_CONNECTIONS)
    publisher = Publisher(settings.amqp_url.get_secret_value(), f"api {settings.api_port}", list(PROFILES))
    events = AsyncEvents(settings.redis_url.get_secret_value())
    announcer = Announcer(events)
    sign = UrlSigner(settings, presigner(settings)).sign
    reads = JobReads(engine, sign, events)
    return Resources(
        settings=settings,
        engine=engine,
        submit_engine=submit_engine,
        sign=sign,
        publisher=publisher,
        events=events,
        announcer=announcer,
        keys=KeyRing(engine),
        reads=reads,
        hub=Hub(events, reads, settings.max_sockets, settings.max_sockets_per_tenant),
        submitter=Submitter(submit_engine, publisher, announcer, settings.publish_timeout_s),
    )


@contextlib.asynccontextmanager
async def running(resources: Resources) -> AsyncIterator[None]:
    """Keep the loops running that no request waits for; close every connection at the end."""
    loops = {
        "publisher": resources.publisher.run,
        "submitter": resources.submitter.run,
        "announcer": resources.announcer.run,
        "hub": resources.hub.run,
    }
    tasks = [asyncio.create_task(_keep_running(name, loop), name=name) for name, loop in loops.items()]
    try:
        yield
    finally:
        resources.hub.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await resources.events.close()
        await resources.engine.dispose()
        await resources.submit_engine.dispose()


def resources_of(connection: HTTPConnection) -> Resources:
    """The resources of the app that serves this request or socket."""
    resources: Resources = connection.app.state.resources
    return resources


async def _keep_running(name: str, loop: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await loop()
        except Exception:  # the loop's edge: the process goes on serving and says what happened
            log.exception("loop_failed", loop=name)
        await asyncio.sleep(_RESTART_S)
