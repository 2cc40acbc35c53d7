"""Hints over Redis: progress of jobs, "this job has changed", "look for a cancel". Losing any of them loses nothing."""

import contextlib
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

import redis
import redis.asyncio
import structlog

EVENTS_CHANNEL = "latentmill:events"
CANCEL_CHANNEL = "latentmill:cancel"
# The last progress of a job outlives the job's longest silence, a slow step, many times over.
_PROGRESS_TTL_S = 3600
# A hint that takes longer is not worth waiting for.
_TIMEOUT_S = 0.5
# A listener hears nothing for hours on a quiet farm. It asks this often whether the other end still lives, since a
# connection whose peer vanished looks just as quiet; one unanswered question ends it.
_PING_EVERY_S = 5.0
# Several batches' worth of steps; while Redis hangs the rest is dropped.
_OUTBOX_EVENTS = 1000

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class JobChanged:
    """The row of a job has a new version; whoever cares reads it."""

    job_id: str
    tenant_id: str
    version: int


@dataclass(frozen=True, slots=True)
class JobProgress:
    """What a running attempt is doing. `eta_s` is the rest of the denoising in seconds, once that can be said."""

    job_id: str
    tenant_id: str
    attempt: int
    phase: str
    step: int
    steps: int
    eta_s: float | None


Event = JobChanged | JobProgress


def encode_event(event: Event) -> str:
    """One event as JSON."""
    return json.dumps({"type": type(event).__name__, **asdict(event)})


def decode_event(raw: str | bytes) -> Event | None:
    """The event, or None for what this version does not know."""
    try:
        body: dict[str, Any] = json.loads(raw)
        kind = {"JobChanged": JobChanged, "JobProgress": JobProgress}.get(body.pop("type"))
        return kind(**body) if kind else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


class EventSender:
    """Sends hints from a worker on a thread of its own, so that a slow Redis never slows a job down."""

    def __init__(self, redis_url: str) -> None:
        self._redis = redis.Redis.from_url(redis_url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._listening = redis.Redis.from_url(redis_url, socket_connect_timeout=_TIMEOUT_S)
        self._outbox: queue.Queue[Event | None] = queue.Queue(maxsize=_OUTBOX_EVENTS)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def send(self, event: Event) -> None:
        """Send one event soon. When too many wait already, it is dropped: clients still see the job in Postgres."""
        with contextlib.suppress(queue.Full):
            self._outbox.put_nowait(event)

    def cancels(self) -> Iterator[str]:
        """Ids of jobs that somebody asked to cancel, from now on. Raises redis.RedisError when the connection ends."""
        with self._listening.pubsub(ignore_subscribe_messages=True) as pubsub:
            pubsub.subscribe(CANCEL_CHANNEL)
            asked = False
            while True:
                message = pubsub.get_message(timeout=_PING_EVERY_S)
                if message is None:
                    asked = _still_waiting(asked)
                    pubsub.ping()
                    continue
                asked = False
                if message["type"] == "message":
                    yield str(message["data"])

    def close(self) -> None:
        """Send what waits, for a moment at most."""
        with contextlib.suppress(queue.Full):
            self._outbox.put_nowait(None)
        self._thread.join(timeout=2 * _TIMEOUT_S)

    def _run(self) -> None:
        while (event := self._outbox.get()) is not None:
            try:
                pipeline = self._redis.pipeline(transaction=False)
                pipeline.publish(EVENTS_CHANNEL, encode_event(event))
                if isinstance(event, JobProgress):
                    pipeline.set(progress_key(event.job_id), encode_event(event), ex=_PROGRESS_TTL_S)
                pipeline.execute()
            except redis.RedisError as error:
                log.debug("event_not_sent", error=type(error).__name__)


def progress_key(job_id: str) -> str:
    """Where the last progress of a job is kept."""
    return f"latentmill:progress:{job_id}"


class AsyncEvents:
    """Sends and receives hints in an event loop (api, dispatcher)."""

    def __init__(self, redis_url: str) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            redis_url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
        )
        # Listening waits for as long as nothing happens, so it has no read timeout.
        self._listening = redis.asyncio.Redis.from_url(redis_url, socket_connect_timeout=_TIMEOUT_S)

    async def send_many(self, events: Sequence[Event], cancels: Sequence[UUID] = ()) -> None:
        """Send events, and hints for the workers that run these jobs to look for a cancel, in one round trip."""
        if not events and not cancels:
            return
        pipeline = self._redis.pipeline(transaction=False)
        for event in events:
            pipeline.publish(EVENTS_CHANNEL, encode_event(event))
        for job_id in cancels:
            pipeline.publish(CANCEL_CHANNEL, str(job_id))
        try:
            await pipeline.execute()
        except redis.RedisError as error:
            log.debug("events_not_sent", events=len(events) + len(cancels), error=type(error).__name__)

    async def last_progress(self, job_ids: list[str]) -> dict[str, JobProgress]:
        """The last progress of these jobs, as far as Redis has it."""
        if not job_ids:
            return {}
        try:
            raws = await self._redis.mget([progress_key(job_id) for job_id in job_ids])
        except redis.RedisError:
            return {}
        events = [decode_event(raw) for raw in raws if raw]
        return {event.job_id: event for event in events if isinstance(event, JobProgress)}

    async def listen(self, subscribed: Callable[[], None] | None = None) -> AsyncIterator[Event]:
        """Every event from now on. Raises redis.RedisError when the connection is lost.

        `subscribed` is called once no event can be missed any more.
        """
        async with self._listening.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(EVENTS_CHANNEL)
            if subscribed is not None:
                subscribed()
            asked = False
            while True:
                message = await pubsub.get_message(timeout=_PING_EVERY_S)
                if message is None:
                    asked = _still_waiting(asked)
                    await pubsub.ping()
                    continue
                asked = False
                event = decode_event(message["data"]) if message["type"] == "message" else None
                if event is not None:
                    yield event

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
        await self._listening.aclose()


def _still_waiting(asked: bool) -> bool:  # noqa: FBT001  a step of two loops' state
    """Note a question to the server. Raises redis.ConnectionError when the last one got no answer."""
    if asked:
        msg = f"the server said nothing for {2 * _PING_EVERY_S:g} s"
        raise redis.ConnectionError(msg)
    return True
