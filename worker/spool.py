"""The folder where finished videos wait for their upload: one for each worker, held by a lock."""

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class SpoolTakenError(RuntimeError):
    """Another process uses this worker's spool."""


@contextmanager
def open_spool(parent: Path, worker_id: str) -> Iterator[Path]:
    """Hold the spool of this worker for as long as it runs.

    What an earlier process left in it is removed: the leases of those attempts are gone. Raises SpoolTakenError.
    """
    folder = parent / _UNSAFE.sub("_", worker_id)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            msg = f"another worker uses {folder}: give each its own LATENTMILL_WORKER_ID or LATENTMILL_SPOOL_DIR"
            raise SpoolTakenError(msg) from error
        for leftover in folder.glob("*.mp4*"):
            leftover.unlink()
        yield folder
