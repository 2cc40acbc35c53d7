"""What an exception out of a pipeline means for the jobs in it."""

from dataclasses import dataclass

import torch

from common.domain.jobs import ErrorClass
from common.domain.parameters import JobParameters
from worker.engine.base import EngineBrokenError

# After these the CUDA context of the process is lost: every later call fails too.
_CONTEXT_LOST = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"


@dataclass(frozen=True, slots=True)
class Failure:
    """Holds no exception: its traceback would keep the activations alive while memory is being freed."""

    error: ErrorClass
    detail: str


def failure_of(error: Exception, shared: JobParameters, count: int) -> Failure:
    """Classify. Raises EngineBrokenError when this process cannot go on."""
    text = str(error)
    if any(sign in text for sign in _CONTEXT_LOST):
        raise EngineBrokenError(text.splitlines()[0]) from None
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_OUT_OF_MEMORY in text:
        what = f"{count} x {shared.width}x{shared.height}, {shared.num_frames} frames"
        return Failure(ErrorClass.OOM, f"the device ran out of memory at {what}")
    return Failure(ErrorClass.INTERNAL, f"{type(error).__name__}: {text}"[:500])
