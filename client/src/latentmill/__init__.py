"""Client of the latentmill render farm: submit a prompt, follow the job, fetch the video."""

from importlib.metadata import version

from latentmill.client import DEFAULT_URL, Client
from latentmill.errors import (
    ApiError,
    BadAnswerError,
    ConnectionFailedError,
    DownloadError,
    FieldError,
    LatentmillError,
    NoVideoError,
    WaitTimeoutError,
)
from latentmill.models import Failure, Job, JobOptions, Progress, QueuePlace, Result
from latentmill.progress import Event
from latentmill.transport import RetryPolicy

__version__ = version("latentmill")

__all__ = [
    "DEFAULT_URL",
    "ApiError",
    "BadAnswerError",
    "Client",
    "ConnectionFailedError",
    "DownloadError",
    "Event",
    "Failure",
    "FieldError",
    "Job",
    "JobOptions",
    "LatentmillError",
    "NoVideoError",
    "Progress",
    "QueuePlace",
    "Result",
    "RetryPolicy",
    "WaitTimeoutError",
    "__version__",
]
