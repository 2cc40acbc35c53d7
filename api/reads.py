"""Reads of jobs. Those that are asked for while others are under way become one query a tenant."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncEngine

from api.fetch import fetch
from api.render import Sign, render_job, to_json
from common.db.readings import JOB_BY_ID, JOB_MARKS, JOBS_BY_ID, JOBS_PAGE, LIVE_JOBS
from common.domain.jobs import TERMINAL_STATES, JobState
from common.events import AsyncEvents, JobProgress

# Queries at a time: enough to hide the round trip, few enough that reads gather into batches instead of connections.
_SLOTS = 4
_MAX_BATCH = 500
# Lists read up to a thousand rows. They have slots of their own, and a tenant gets one of them at a time: whoever lists
# without end waits for himself, and nobody else's reads wait for him.
_LIST_SLOTS = 2
# Rendering a row takes tens of microseconds; after so many the event loop gets to see to others.
_RENDERED_AT_ONCE = 50
# The last progress of so many jobs is kept, about 400 bytes each; far more than there are GPUs behind one farm.
_MAX_PROGRESS = 10_000

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class JobView:
    """One job as it was read: `body` is what clients are shown, `text` the same as JSON, made once for all of them."""

    job_id: UUID
    tenant_id: UUID
    version: int
    attempt: int
    state: str
    body: dict[str, Any]
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the JSON."""
        object.__setattr__(self, "text", to_json(self.body))  # frozen for everybody else

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self.state in TERMINAL_STATES


class LatestProgress:
    """The last progress of each running job, as heard over Redis."""

    def __init__(self) -> None:
        self._by_job: OrderedDict[UUID, JobProgress | None] = OrderedDict()

    def note(self, job_id: UUID, progress: JobProgress | None) -> None:
        """Keep this one; None says that nothing is to be found in Redis either."""
        self._by_job[job_id] = progress
        self._by_job.move_to_end(job_id)
        if len(self._by_job) > _MAX_PROGRESS:
            self._by_job.popitem(last=False)

    def of(self, job_id: UUID) -> JobProgress | None:
        """The last one of the job, if any is known."""
        return self._by_job.get(job_id)

    def unasked(self, job_ids: Iterable[UUID]) -> list[UUID]:
        """Those of which nothing is known, not even that nothing is."""
        return [job_id for job_id in job_ids if job_id not in self._by_job]

    def forget(self, job_id: UUID) -> None:
        """The job has ended."""
        self._by_job.pop(job_id, None)


class JobReads:
    """Reads jobs for requests and for followers. Every method raises SQLAlchemy's errors."""

    def __init__(self, engine: AsyncEngine, sign: Sign, events: AsyncEvents) -> None:
        self.latest = LatestProgress()
        self._events = events
        self._engine = engine
        self._sign = sign
        self._slots = asyncio.Semaphore(_SLOTS)
        self._list_slots = asyncio.Semaphore(_LIST_SLOTS)
        self._turns: dict[UUID, asyncio.Lock] = {}
        self._live: dict[UUID, asyncio.Task[list[JobView]]] = {}
        self._waiting: dict[UUID, dict[UUID, asyncio.Future[JobView | None]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def job(self, tenant_id: UUID, job_id: UUID) -> JobView | None:
        """One job of the tenant, or None."""
        return (await self.jobs(tenant_id, [job_id])).get(job_id)

    async def jobs(self, tenant_id: UUID, job_ids: Iterable[UUID]) -> dict[UUID, JobView]:
        """Those of the jobs that exist and are the tenant's."""
        asked = {job_id: self._ask(tenant_id, job_id) for job_id in job_ids}
        # Every answer is taken before the first error is raised, so that none is left unread.
        answers = await asyncio.gather(*asked.values(), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return {view.job_id: view for view in answers if isinstance(view, JobView)}

    async def page(
        self, tenant_id: UUID, before: UUID | None, state: str | None, model: str | None, limit: int
    ) -> list[JobView]:
        """The tenant's newest jobs older than `before`, at most `limit`."""
        filters = {"before": before and str(before), "state": state, "model": model, "limit": limit}
        async with self._list_slot(tenant_id):
            return await self._views(await fetch(self._engine, JOBS_PAGE, {"tenant_id": str(tenant_id), **filters}))

    async def live(self, tenant_id: UUID, limit: int) -> list[JobView]:
        """The tenant's jobs that have not ended, oldest first, at most `limit`, as of a moment after the call."""
        task = self._live.get(tenant_id)
        if task is None:
            task = self._live[tenant_id] = self._start(self._read_live(tenant_id, limit))
        return await asyncio.shield(task)

    async def _read_live(self, tenant_id: UUID, limit: int) -> list[JobView]:
        async with self._list_slot(tenant_id):
            del self._live[tenant_id]  # whoever asks from here on needs what this read cannot see any more
            return await self._views(
                await fetch(self._engine, LIVE_JOBS, {"tenant_id": str(tenant_id), "limit": limit})
            )

    def _start(self, reading: Coroutine[Any, Any, _Read]) -> asyncio.Task[_Read]:
        task = asyncio.create_task(reading)
        self._tasks.add(task)  # the loop itself does not keep it
        task.add_done_callback(self._tasks.discard)
        return task

    @contextlib.asynccontextmanager
    async def _list_slot(self, tenant_id: UUID) -> AsyncIterator[None]:
        async with self._turns.setdefault(tenant_id, asyncio.Lock()), self._list_slots:
            yield

    async def marks(self, job_ids: Collection[UUID], since: Mapping[UUID, UUID]) -> Sequence[Row[Any]]:
        """Version and progress of jobs by id, and of each tenant's live jobs whose id is greater than that given."""
        tenants = {"tenant_ids": list(map(str, since)), "sinces": list(map(str, since.values()))}
        asked = {"ids": list(map(str, job_ids)), **tenants}
        return await fetch(self._engine, JOB_MARKS, asked)

    def _ask(self, tenant_id: UUID, job_id: UUID) -> asyncio.Future[JobView | None]:
        batch = self._waiting.get(tenant_id)
        if batch is None:
            batch = self._waiting[tenant_id] = {}
            self._start(self._answer(tenant_id))
        future = batch.get(job_id)
        if future is None:
            future = batch[job_id] = asyncio.get_running_loop().create_future()
        return asyncio.shield(future)  # one caller's cancellation is not the others'

    async def _answer(self, tenant_id: UUID) -> None:
        async with self._slots:
            batch = self._waiting.pop(tenant_id)  # whoever asks from here on is in the next one
            try:
                views = await self._by_id(tenant_id, list(batch))
            except Exception as error:  # noqa: BLE001  every waiter gets it, whatever it is
                for future in batch.values():
                    future.set_exception(error)
            else:
                for job_id, future in batch.items():
                    future.set_result(views.get(job_id))

    async def _by_id(self, tenant_id: UUID, job_ids: list[UUID]) -> dict[UUID, JobView]:
        views: dict[UUID, JobView] = {}
        for start in range(0, len(job_ids), _MAX_BATCH):
            ids = list(map(str, job_ids[start : start + _MAX_BATCH]))
            tenant = {"tenant_id": str(tenant_id)}
            one = len(ids) == 1
            asked = (JOB_BY_ID, {**tenant, "id": ids[0]}) if one else (JOBS_BY_ID, {**tenant, "ids": ids})
            rows = await fetch(self._engine, *asked)
            views.update((view.job_id, view) for view in await self._views(rows))
        return views

    async def _views(self, rows: Sequence[Row[Any]]) -> list[JobView]:
        running = self.latest.unasked(row.id for row in rows if row.state == JobState.RUNNING)
        if running:  # since before this process started
            found = await self._events.last_progress(list(map(str, running)))
            for job_id in self.latest.unasked(running):  # what was heard meanwhile is newer
                self.latest.note(job_id, found.get(str(job_id)))
        views: list[JobView] = []
        for start in range(0, len(rows), _RENDERED_AT_ONCE):
            views.extend(map(self._view, rows[start : start + _RENDERED_AT_ONCE]))
            await asyncio.sleep(0)
        return views

    def _view(self, row: Row[Any]) -> JobView:
        body = render_job(row._mapping, self.latest.of(row.id), self._sign)  # noqa: SLF001  SQLAlchemy's public name
        return JobView(row.id, row.tenant_id, row.version, row.attempt, row.state, body)
