"""Where the stacks of a test run live: a directory for each of its processes, so that parallel runs do not meet."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def stack_directory(kind: str) -> Path:
    """The directory of this process's stack of the given kind."""
    return REPOSITORY / ".stack" / f"test-{kind}-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
