"""The messages on the pipe between parent and child, pickled; both ends are the same version of this program."""

from dataclasses import dataclass

from worker.engine.base import Batch, Capabilities, EngineConfig
from worker.engine.frames import Layout


@dataclass(frozen=True, slots=True)
class Load:
    """First message to a child: what to load."""

    config: EngineConfig
    layout: Layout


@dataclass(frozen=True, slots=True)
class Run:
    """Render this batch; deadline on time.monotonic()."""

    batch: Batch
    deadline: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop these jobs from the running batch, or from the next one."""

    job_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stop this batch; ignored when another one runs."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The parent has read the frames in this slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave after the running batch."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Loaded and warm."""

    capabilities: Capabilities


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The child will exit; the traceback of the reason."""

    detail: str


@dataclass(frozen=True, slots=True)
class FramesAt:
    """FramesReady, with the frames in a slot of the shared memory."""

    job_id: str
    index: int
    slot: int
    shape: tuple[int, ...]


Command = Load | Run | Cancel | Interrupt | GiveBack | Stop
