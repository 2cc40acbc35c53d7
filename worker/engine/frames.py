"""Frames cross from the child to the parent in shared memory, a fixed number of slots, so that neither can flood RAM.

The memory is a memfd: it has no name, so nothing is left in /dev/shm whichever side is killed, and no resource tracker
is needed. Pages are only backed once they are written, so slots for the largest size cost nothing for small jobs.
"""

import mmap
import os
import queue
from dataclasses import dataclass

import numpy as np

from worker.engine.base import MAX_CHUNK_FRAMES, Frames

# Two seconds of video: the encoder may fall that far behind before the decode waits for it (88 MB at 1280x720).
SLOTS = 8
_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Layout:
    """How the memory is divided."""

    slots: int
    slot_bytes: int

    @classmethod
    def for_area(cls, max_area: int) -> "Layout":
        """Slots that hold the largest chunk of a model whose frames have at most `max_area` pixels."""
        return cls(SLOTS, max_area * _CHANNELS * MAX_CHUNK_FRAMES)


class SharedFrames:
    """One side's view of the slots. The mapping lives as long as any view on it."""

    def __init__(self, fd: int, layout: Layout) -> None:
        self.layout = layout
        self._memory = mmap.mmap(fd, layout.slots * layout.slot_bytes)

    def view(self, slot: int, shape: tuple[int, ...]) -> Frames:
        """The first bytes of a slot as frames of this shape."""
        count = int(np.prod(shape))
        return np.frombuffer(self._memory, np.uint8, count, slot * self.layout.slot_bytes).reshape(shape)


def create(layout: Layout) -> int:
    """Make the memory; the caller closes the descriptor once both sides have mapped it."""
    fd = os.memfd_create("latentmill-frames", os.MFD_CLOEXEC)
    os.ftruncate(fd, layout.slots * layout.slot_bytes)
    return fd


class FrameWriter:
    """The child's side: takes a free slot, or waits until the parent gives one back."""

    def __init__(self, shared: SharedFrames) -> None:
        self._shared = shared
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(shared.layout.slots):
            self._free.put(slot)

    def put(self, frames: Frames) -> int:
        """Copy frames into a slot and return its number. Raises ValueError when they do not fit."""
        if frames.nbytes > self._shared.layout.slot_bytes:
            msg = f"a chunk of shape {frames.shape} does not fit a slot of {self._shared.layout.slot_bytes} bytes"
            raise ValueError(msg)
        slot = self._free.get()
        np.copyto(self._shared.view(slot, frames.shape), frames)
        return slot

    def give_back(self, slot: int) -> None:
        """Take a slot back from the parent (called in the thread that reads commands)."""
        self._free.put(slot)
