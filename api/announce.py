"""Tells the other processes over Redis what this one did. No request waits for that, and losing it loses nothing."""

import asyncio
from collections import deque
from uuid import UUID

from common.events import AsyncEvents, JobChanged

# While Redis is away the oldest announcements fall out; sockets find the changes in Postgres.
_MAX_WAITING = 4096
_MAX_SENT_TOGETHER = 256


class Announcer:
    """Gathers announcements and sends them in pipelines for as long as `run` runs."""

    def __init__(self, events: AsyncEvents) -> None:
        self._events = events
        self._waiting: deque[JobChanged | UUID] = deque(maxlen=_MAX_WAITING)
        self._wake = asyncio.Event()

    def changed(self, job_id: UUID, tenant_id: UUID, version: int) -> None:
        """The job's row has a new version."""
        self._put(JobChanged(str(job_id), str(tenant_id), version))

    def cancel(self, job_id: UUID) -> None:
        """The worker that runs this job should look for a cancel now."""
        self._put(job_id)

    async def run(self) -> None:
        """Send what gathers, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                together = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_SENT_TOGETHER))]
                changes = [item for item in together if isinstance(item, JobChanged)]
                await self._events.send_many(changes, [item for item in together if isinstance(item, UUID)])

    def _put(self, item: JobChanged | UUID) -> None:
        self._waiting.append(item)
        self._wake.set()
