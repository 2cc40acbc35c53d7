"""The attempts that this worker has claimed and not ended yet; shared by the main, heartbeat and delivery threads."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from common.domain.ids import format_job_id
from common.domain.jobs import Phase
from common.domain.parameters import JobParameters


@dataclass(slots=True)
class Attempt:
    """One claim. (job_id, attempt, token) is the fence of everything that is written about it.

    version: of the row, as the claim left it. waited_s: from submit to claim. started_at and deadline (when the job
    fails for good) are on time.monotonic(). gpu_seconds: its share of the engine's time so far.
    """

    job_id: UUID
    tenant_id: UUID
    version: int
    attempt: int
    token: UUID
    parameters: JobParameters
    failures: Mapping[str, int]
    waited_s: float
    started_at: float
    deadline: float
    batch_size: int = 1
    phase: Phase = Phase.TEXT
    step: int = 0
    timings_ms: dict[str, int] = field(default_factory=dict)
    gpu_seconds: float = 0.0
    finished: bool = False  # its video is complete, and only has to be delivered
    unwanted: bool = False  # cancelled, or another attempt owns the job: nobody waits for this result any more

    @property
    def in_engine(self) -> bool:
        """Whether the engine still works on it; afterwards it is encoded and uploaded."""
        return self.phase not in {Phase.ENCODE, Phase.UPLOAD}

    @property
    def alone(self) -> bool:
        """Whether it ran without mates, so that what happened to the engine may be its own doing."""
        return self.batch_size == 1

    @property
    def wire_id(self) -> str:
        """The job's id as clients, events and the engine know it."""
        return format_job_id(self.job_id)

    def fence(self) -> dict[str, Any]:
        """The values that every statement about this attempt is guarded with."""
        return {"id": str(self.job_id), "attempt": self.attempt, "token": str(self.token)}


class ActiveAttempts:
    """A set of attempts that several threads look at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[UUID, Attempt] = {}

    def add(self, attempts: list[Attempt]) -> None:
        """From now on the heartbeat renews their leases."""
        with self._lock:
            self._by_id.update({attempt.job_id: attempt for attempt in attempts})

    def remove(self, attempt: Attempt) -> None:
        """The attempt has ended. Another attempt of the same job stays."""
        with self._lock:
            if self._by_id.get(attempt.job_id) is attempt:
                del self._by_id[attempt.job_id]

    def snapshot(self) -> list[Attempt]:
        """All of them, as of now."""
        with self._lock:
            return list(self._by_id.values())
