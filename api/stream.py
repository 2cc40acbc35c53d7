"""What one follower (a WebSocket or an SSE response) has been told and is still to be sent. No I/O in here.

Order and completeness come from the version of a job's row: a follower is told a version once, and never an older one
after it. Progress is the part that may be dropped.
"""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from api.reads import JobView
from api.render import to_json
from common import telemetry

# Two progress events a second are all that an eye uses, so that is the sustained rate of a socket. The burst lets a
# job of up to 64 steps show each of them however fast they come; a job of an hour earns its tokens as it goes.
PROGRESS_PER_S = 2.0
PROGRESS_BURST = 64.0
# A reader with so many frames unread is slow: what its progress bar would show is old already.
MAX_UNREAD_FOR_PROGRESS = 64
# State frames are never dropped. A reader that leaves so much unread is closed instead, and reads a fresh snapshot.
MAX_UNREAD_CHARS = 4 * 1024 * 1024
# Clients of the websockets library refuse frames over 1 MiB, so a long snapshot is several frames.
MAX_SNAPSHOT_CHARS = 256 * 1024

DISCONNECTED = 1005  # "no status": never sent, there is nobody left
GOING_AWAY = 1012  # "service restart": clients reconnect at once
TRY_LATER = 1013


@dataclass(frozen=True, slots=True)
class Frame:
    """One message as text, and for SSE its event name, its id and whether it is the last of its job."""

    kind: str
    text: str
    seq: int | None = None
    last: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A job's new version on its way to its followers. `first` is false for a repeated report that a job has ended."""

    view: JobView
    frame: Frame
    first: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """Progress of one attempt on its way to the job's followers."""

    job_id: UUID
    attempt: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Told:
    """What a follower was last told of a job."""

    version: int
    attempt: int


@dataclass(slots=True)
class Bucket:
    """Tokens for what may happen `rate` times a second in the long run, and `burst` times at once."""

    rate: float
    burst: float
    _tokens: float = field(init=False)
    _at: float = 0.0

    def __post_init__(self) -> None:
        """Start full."""
        self._tokens = self.burst

    def take(self, now: float) -> bool:
        """Take a token if there is one. `now` is a monotonic time in seconds."""
        earned = max(0.0, now - self._at) * self.rate
        self._tokens, self._at = min(self.burst, self._tokens + earned), now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(slots=True, eq=False)
class Stream:
    """One follower. `live` says of the jobs it follows that have not ended what it was last told."""

    tenant_id: UUID
    everything_since: UUID | None = None  # every job of the tenant; ids sort by time, so this says since when
    loading: bool = False  # a snapshot is being read: changes wait, as it comes first
    live: dict[UUID, Told] = field(default_factory=dict)
    close_code: int | None = None
    _frames: deque[Frame] = field(default_factory=deque)
    _held: list[Change | Step] = field(default_factory=list)
    _unread_chars: int = 0
    _progress: Bucket = field(default_factory=lambda: Bucket(PROGRESS_PER_S, PROGRESS_BURST))
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def follow_all(self, since: UUID) -> None:
        """Take an interest in every job of the tenant from now on; `since` is an id made now."""
        self.everything_since, self.loading = since, True

    def tell_snapshot(self, views: Sequence[JobView]) -> None:
        """Send the jobs as they are now."""
        for frame in snapshot_frames(views):
            self._put(frame)

    def adopt(self, views: Collection[JobView]) -> None:
        """Follow these jobs from the version just read, and send the changes that came meanwhile."""
        told = {view.job_id: view.version for view in views}
        self.live.update({view.job_id: Told(view.version, view.attempt) for view in views if not view.terminal})
        self.loading = False
        held, self._held = self._held, []
        for item in held:
            if isinstance(item, Step):
                self.tell_step(item, time.monotonic())
            elif item.view.version > told.get(item.view.job_id, 0):
                self.tell_change(item)

    def misses(self, job_id: UUID, version: int) -> bool:
        """Whether this follower should know of a version and does not."""
        known = self.live.get(job_id)
        if known is None:
            # Older jobs that are not known were too many for the snapshot; they come when they change.
            return self.everything_since is not None and job_id > self.everything_since
        return known.version < version

    def lags(self, job_id: UUID, attempt: int) -> bool:
        """Whether this follower has to be told of the attempt before it is told of its progress."""
        known = self.live.get(job_id)
        return self.loading or known is None or known.attempt < attempt

    def tell_change(self, change: Change) -> None:
        """Send a new version, unless this follower knows it, a later one, or has no interest in the job."""
        if self.loading:
            self._held.append(change)
            return
        view = change.view
        known = self.live.get(view.job_id)
        if known is None and not (self.everything_since and change.first):
            return
        if known is not None and view.version <= known.version:
            return
        if view.terminal:
            self.live.pop(view.job_id, None)
        else:
            self.live[view.job_id] = Told(view.version, view.attempt)
        self._put(change.frame)

    def tell_step(self, step: Step, now: float) -> None:
        """Send progress if the reader keeps up and the rate allows it. `now` is a monotonic time in seconds."""
        if self.loading:
            if len(self._held) < MAX_UNREAD_FOR_PROGRESS:
                self._held.append(step)
            return
        known = self.live.get(step.job_id)
        if known is None or known.attempt != step.attempt:
            return
        if len(self._frames) >= MAX_UNREAD_FOR_PROGRESS:
            telemetry.events_dropped.inc()
        elif self._progress.take(now):
            self._put(step.frame)

    def tell_steps(self, steps: Sequence[Step], attempt: int, now: float) -> None:
        """Send the progress of an attempt that was just read."""
        known = self.live.get(steps[0].job_id) if steps else None
        if known is not None:
            self.live[steps[0].job_id] = Told(known.version, attempt)
        for step in steps:
            self.tell_step(step, now)

    def tell(self, kind: str, **fields: Any) -> None:  # noqa: ANN401  whatever JSON can hold
        """Send a message that belongs to no job's order."""
        self._put(Frame(kind, to_json({"type": kind, **fields})))

    def close(self, code: int) -> None:
        """End this stream after what is queued."""
        self.close_code = self.close_code or code
        self._wake.set()

    def expel(self, close_code: int, **error: str) -> None:
        """End this stream with an error, and leave unsaid what is queued."""
        self._frames.clear()
        self._unread_chars = 0
        self.tell("error", **error)
        self.close(close_code)

    def disconnect(self) -> None:
        """The reader has left: nothing more can be sent."""
        self._frames.clear()
        self.close_code = DISCONNECTED
        self._wake.set()

    async def next(self) -> Frame | None:
        """The next frame to send, or None when the stream is to be closed."""
        while not self._frames:
            if self.close_code is not None:
                return None
            self._wake.clear()
            await self._wake.wait()
        frame = self._frames.popleft()
        self._unread_chars -= len(frame.text)
        return frame

    def _put(self, frame: Frame) -> None:
        if self.close_code is not None:
            return
        self._frames.append(frame)
        self._unread_chars += len(frame.text)
        if self._unread_chars > MAX_UNREAD_CHARS:
            self._frames.clear()
            self.close_code = TRY_LATER
        self._wake.set()


def snapshot_frames(views: Sequence[JobView]) -> list[Frame]:
    """The jobs in as few frames as their size allows; one frame also for no job at all."""
    parts: list[list[str]] = [[]]
    size = 0
    for view in views:
        if parts[-1] and size + len(view.text) > MAX_SNAPSHOT_CHARS:
            parts.append([])
            size = 0
        parts[-1].append(view.text)
        size += len(view.text)
    only = views[0] if len(views) == 1 else None
    seq, last = (only.version, only.terminal) if only else (None, False)
    return [Frame("snapshot", '{"type":"snapshot","jobs":[' + ",".join(part) + "]}", seq, last) for part in parts]


def state_frame(view: JobView) -> Frame:
    """The event about a job's new version."""
    event = {"type": "job.state", "job_id": view.body["id"], "seq": view.version, "status": view.state}
    text = f'{to_json(event)[:-1]},"job":{view.text}}}'
    return Frame("job.state", text, view.version, view.terminal)
