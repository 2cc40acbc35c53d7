"""A tiny job of the worker's own that shows whether its engine works. It is in no table, and its video goes nowhere."""

import time
import uuid

import structlog

from common.domain.profiles import PROFILES
from common.settings import WorkerSettings
from worker.engine.base import Batch, FramesReady, MemberDecoded, MemberFailed
from worker.engine.process import EngineError, EngineProcess
from worker.engine.warmup import smallest_member

# The warm-up takes seconds on a GPU; an engine that takes longer than this for the same job does not work.
_LIMIT_S = 300.0

log = structlog.get_logger()


def passes(engine: EngineProcess, settings: WorkerSettings) -> bool:
    """Render the smallest job of the model: True when all its frames came. The engine may be lost afterwards."""
    member = smallest_member(PROFILES[settings.model], with_picture=settings.engine != "synthetic")
    batch = Batch(f"canary-{uuid.uuid4()}", (member,))
    deadline = time.monotonic() + _LIMIT_S
    decoded = False
    try:
        for event in engine.run(batch, stall_s=settings.stall_s, deadline=deadline):
            match event:
                case FramesReady():
                    event.release()
                case MemberDecoded():
                    decoded = True
                case MemberFailed(_, error, detail):
                    log.warning("canary_job_failed", error_class=error, detail=detail)
    except EngineError as error:
        log.warning("canary_lost_its_engine", detail=str(error))
        return False
    return decoded
