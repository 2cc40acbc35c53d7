"""What the parts of a worker share: its connections and what it runs."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Engine

from common.events import EventSender, JobProgress
from common.settings import WorkerSettings
from worker.attempts import ActiveAttempts, Attempt

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client


@dataclass(frozen=True, slots=True)
class Connections:
    """Open for as long as the worker runs. `closing` is set when waiting for a dependency makes no sense any more."""

    settings: WorkerSettings
    worker_id: str
    spool: Path
    database: Engine
    s3: "S3Client"
    events: EventSender
    active: ActiveAttempts
    closing: threading.Event


def show_progress(connections: Connections, attempt: Attempt, eta_s: float | None = None) -> None:
    """Tell clients what this attempt is doing now."""
    connections.events.send(
        JobProgress(
            job_id=str(attempt.job_id),
            tenant_id=str(attempt.tenant_id),
            attempt=attempt.attempt,
            phase=attempt.phase,
            step=attempt.step,
            steps=attempt.parameters.num_inference_steps,
            eta_s=eta_s,
        )
    )
