"""Who follows which jobs in this process. One Redis subscription feeds every socket; Postgres has the last word.

An event only says where to look: the row is read, and its version decides what a follower is told. Events may be lost,
so every followed job is compared with Postgres now and then, and often while Redis is away.
"""

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any
from uuid import UUID

import redis
import structlog
from sqlalchemy.exc import SQLAlchemyError

from api.fetch import loggable
from api.problems import refusal
from api.reads import JobReads, JobView
from api.render import progress_event, to_json
from api.stream import GOING_AWAY, MAX_UNREAD_FOR_PROGRESS, Change, Frame, Step, Stream, state_frame
from common.domain.errors import TOO_MANY_STREAMS
from common.domain.ids import new_id
from common.events import AsyncEvents, Event, JobProgress

# How old a missed change may get. With Redis the check finds next to nothing; without it, it is all there is.
CHECK_WITH_REDIS_S = 15.0
CHECK_WITHOUT_REDIS_S = 2.0
_RECONNECT_FIRST_S = 0.2
_RECONNECT_CAP_S = 5.0  # a Redis that is back should be used again within seconds
# A snapshot of all live jobs ends here; a tenant with more sees the rest when they change.
MAX_LIVE_JOBS = 1000
# A check of tens of thousands of jobs takes the event loop in turns of about a millisecond.
_COMPARED_AT_ONCE = 500
# Jobs known to have ended, so that a second report of it is not news. Two reports come within a second or two.
_MAX_ENDED = 10_000

log = structlog.get_logger()


class Hub:
    """Carries changes from Redis and Postgres to streams for as long as `run` runs."""

    def __init__(self, events: AsyncEvents, reads: JobReads, max_streams: int, max_streams_per_tenant: int) -> None:
        self.listening = False
        self.closed = False
        self._events = events
        self._reads = reads
        self._max_streams = max_streams
        self._max_streams_per_tenant = max_streams_per_tenant
        self._streams_of: Counter[UUID] = Counter()
        self._streams: set[Stream] = set()
        self._by_job: dict[UUID, set[Stream]] = {}
        self._by_tenant: dict[UUID, set[Stream]] = {}
        self._ended: OrderedDict[UUID, None] = OrderedDict()
        self._wanted: dict[UUID, set[UUID]] = {}
        # Progress of jobs that are wanted or being read: it is told after the state it belongs to.
        self._behind: dict[UUID, list[Step]] = {}
        self._look = asyncio.Event()
        self._check_now = asyncio.Event()

    def open(self, tenant_id: UUID) -> Stream:
        """A new stream that follows nothing yet. Raises LatentmillError (too_many_streams)."""
        if self.closed or len(self._streams) >= self._max_streams:
            raise refusal(TOO_MANY_STREAMS, f"at most {self._max_streams} streams are served")
        if self._streams_of[tenant_id] >= self._max_streams_per_tenant:
            raise refusal(TOO_MANY_STREAMS, f"a tenant has at most {self._max_streams_per_tenant} streams")
        stream = Stream(tenant_id)
        self._streams.add(stream)
        self._streams_of[tenant_id] += 1
        return stream

    def leave(self, stream: Stream) -> None:
        """Forget a stream. Its jobs run on."""
        if stream in self._streams:
            self._streams.remove(stream)
            self._streams_of[stream.tenant_id] -= 1
        _discard(self._by_tenant, stream.tenant_id, stream)
        self.unfollow(stream, list(stream.live))

    def close(self) -> None:
        """Ask every stream to end, as this process is about to."""
        self.closed = True
        for stream in self._streams:
            stream.close(GOING_AWAY)

    async def follow(self, stream: Stream, job_ids: Iterable[UUID], known_version: int | None = None) -> set[UUID]:
        """Send a snapshot of the jobs, then their changes. Returns the ids that are not jobs of the tenant.

        With `known_version` the snapshot is left out when the job still has it. Raises SQLAlchemy's errors.
        """
        asked = set(job_ids)
        for job_id in asked:
            self._by_job.setdefault(job_id, set()).add(stream)
        stream.loading = True  # from here on nothing is missed, and nothing overtakes the snapshot
        views: dict[UUID, JobView] = {}
        try:
            views = await self._reads.jobs(stream.tenant_id, asked)
            if known_version is None or any(view.version != known_version for view in views.values()):
                stream.tell_snapshot(list(views.values()))
        finally:
            stream.adopt(views.values())
            for job_id in asked - stream.live.keys():
                _discard(self._by_job, job_id, stream)
        return asked - views.keys()

    async def follow_all(self, stream: Stream) -> None:
        """Send a snapshot of the tenant's live jobs, then the changes of all its jobs. Raises SQLAlchemy's errors.

        A stream that has everything already gets nothing new by asking again.
        """
        if stream.everything_since is not None:
            return
        self._by_tenant.setdefault(stream.tenant_id, set()).add(stream)
        stream.follow_all(new_id())
        views: list[JobView] = []
        try:
            views = await self._reads.live(stream.tenant_id, MAX_LIVE_JOBS)
            stream.tell_snapshot(views)
        except SQLAlchemyError:
            stream.everything_since = None
            _discard(self._by_tenant, stream.tenant_id, stream)
            raise
        finally:
            stream.adopt(views)

    def unfollow(self, stream: Stream, job_ids: Iterable[UUID]) -> None:
        """Stop telling this stream about the jobs."""
        for job_id in job_ids:
            stream.live.pop(job_id, None)
            _discard(self._by_job, job_id, stream)

    def want(self, tenant_id: UUID, job_id: UUID) -> None:
        """Read the job soon and tell its followers if it has changed."""
        self._wanted.setdefault(tenant_id, set()).add(job_id)
        self._behind.setdefault(job_id, [])
        self._look.set()

    def on_event(self, event: Event) -> None:
        """Take one event from Redis."""
        try:
            job_id, tenant_id = UUID(event.job_id), UUID(event.tenant_id)
        except ValueError:
            return
        if isinstance(event, JobProgress):
            self._on_progress(job_id, tenant_id, event)
        elif self._audience(job_id, tenant_id):
            self.want(tenant_id, job_id)

    def on_view(self, view: JobView) -> None:
        """Tell the followers of a job that was just read."""
        change = Change(view, state_frame(view), first=view.job_id not in self._ended)
        steps, now = self._take_behind(view.job_id, view.attempt), time.monotonic()
        for stream in self._audience(view.job_id, view.tenant_id):
            if view.terminal:  # a job so quick that it was not seen running shows its steps before its end
                stream.tell_steps(steps, view.attempt, now)
                stream.tell_change(change)
            else:
                stream.tell_change(change)
                stream.tell_steps(steps, view.attempt, now)
        if view.terminal:
            self._by_job.pop(view.job_id, None)
            self._reads.latest.forget(view.job_id)
            self._ended[view.job_id] = None
            if len(self._ended) > _MAX_ENDED:
                self._ended.popitem(last=False)

    async def run(self) -> None:
        """Listen, read and check, until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._listen())
            loops.create_task(self._read_wanted())
            loops.create_task(self._check())

    def _on_progress(self, job_id: UUID, tenant_id: UUID, progress: JobProgress) -> None:
        if job_id in self._ended:
            return
        self._reads.latest.note(job_id, progress)
        audience = self._audience(job_id, tenant_id)
        if not audience:
            return
        step = Step(job_id, progress.attempt, Frame("job.progress", to_json(progress_event(progress, job_id))))
        if any(stream.lags(job_id, progress.attempt) for stream in audience):
            self.want(tenant_id, job_id)
        behind = self._behind.get(job_id)
        if behind is None:
            now = time.monotonic()
            for stream in audience:
                stream.tell_step(step, now)
        elif len(behind) < MAX_UNREAD_FOR_PROGRESS:
            behind.append(step)

    def _take_behind(self, job_id: UUID, attempt: int) -> list[Step]:
        """Take the progress that waited for this attempt to be read; that of a later one waits for the next read."""
        waiting = self._behind.get(job_id, [])
        if waiting:
            self._behind[job_id] = [step for step in waiting if step.attempt > attempt]
        return [step for step in waiting if step.attempt <= attempt]

    def _audience(self, job_id: UUID, tenant_id: UUID) -> list[Stream]:
        # A stream may ask for any id, so the tenant is compared here, where every event passes.
        streams = self._by_job.get(job_id, set()) | self._by_tenant.get(tenant_id, set())
        return [stream for stream in streams if stream.tenant_id == tenant_id]

    async def _listen(self) -> None:
        delay = _RECONNECT_FIRST_S
        while True:
            try:
                async for event in self._events.listen(self._listens):
                    delay = _RECONNECT_FIRST_S
                    self.on_event(event)
            except (redis.RedisError, OSError) as error:
                log.warning("events_unreachable", error=type(error).__name__)
            if self.listening:
                self.listening = False
                self._check_now.set()
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RECONNECT_CAP_S)

    def _listens(self) -> None:
        self.listening = True
        self._check_now.set()  # what changed while nobody listened
        log.info("events_connected")

    async def _read_wanted(self) -> None:
        while True:
            await self._look.wait()
            self._look.clear()
            wanted, self._wanted = self._wanted, {}
            await asyncio.gather(*(self._read(tenant_id, job_ids) for tenant_id, job_ids in wanted.items()))

    async def _read(self, tenant_id: UUID, job_ids: set[UUID]) -> None:
        try:
            views = await self._reads.jobs(tenant_id, job_ids)
        except SQLAlchemyError as error:
            log.warning("followed_jobs_not_read", jobs=len(job_ids), **loggable(error))  # the check will
            views = {}
        for view in views.values():
            self.on_view(view)
        for job_id in job_ids - self._wanted.get(tenant_id, set()):
            self._behind.pop(job_id, None)

    async def _check(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_WITH_REDIS_S if self.listening else CHECK_WITHOUT_REDIS_S):
                    await self._check_now.wait()
            self._check_now.clear()
            try:
                await self._compare()
            except SQLAlchemyError as error:
                log.warning("followed_jobs_not_checked", **loggable(error))

    async def _compare(self) -> None:
        """Find what Postgres knows and some follower does not."""
        followed = self._by_job.keys() | {job_id for stream in self._streams for job_id in stream.live}
        if not followed and not self._by_tenant:
            return
        for number, mark in enumerate(await self._reads.marks(followed, self._tenants_followed())):
            if number % _COMPARED_AT_ONCE == 0:
                await asyncio.sleep(0)
            audience = self._audience(mark.id, mark.tenant_id)
            if any(stream.misses(mark.id, mark.version) for stream in audience):
                self.want(mark.tenant_id, mark.id)
            if not self.listening and mark.phase is not None:
                self._note_mark(mark)

    def _tenants_followed(self) -> dict[UUID, UUID]:
        """Tenants of whom somebody follows everything, and the id from which on their jobs may be news.

        Older jobs that somebody knows are asked for by id. Those that nobody knows, as they were too many for the
        snapshot, tell of themselves over Redis; without it they are asked for too.
        """
        if not self.listening:
            return dict.fromkeys(self._by_tenant, UUID(int=0))
        return {
            tenant_id: min(stream.everything_since or UUID(int=0) for stream in streams)
            for tenant_id, streams in self._by_tenant.items()
        }

    def _note_mark(self, mark: Any) -> None:  # noqa: ANN401  a row of JOB_MARKS
        """Progress as the worker's heartbeat left it in Postgres, coarser than what Redis carries."""
        seen = self._reads.latest.of(mark.id)
        if seen is None or (seen.attempt, seen.phase, seen.step) != (mark.attempt, mark.phase, mark.step):
            job_id, tenant_id = str(mark.id), str(mark.tenant_id)
            progress = JobProgress(job_id, tenant_id, mark.attempt, mark.phase, mark.step, mark.steps, None)
            self._on_progress(mark.id, mark.tenant_id, progress)


def _discard(index: dict[UUID, set[Stream]], key: UUID, stream: Stream) -> None:
    streams = index.get(key)
    if streams is not None:
        streams.discard(stream)
        if not streams:
            del index[key]
