"""The folder where finished videos wait for their upload: one for each worker, held by a lock."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import structlog

# A dot at the beginning, too: such a name may lead out of the folder, or be that of a lock.
_UNSAFE = re.compile(r"^\.|[^A-Za-z0-9._-]")
_LOCK = ".lock"

log = structlog.get_logger()


class SpoolTakenError(RuntimeError):
    """Another process uses this worker's spool."""


@contextmanager
def open_spool(parent: Path, worker_id: str) -> Iterator[Path]:
    """Hold the spool of this worker for as long as it runs.

    What earlier processes left, in it and in spools that nobody holds, is removed: the leases of those attempts are
    gone, or will be. Raises SpoolTakenError.
    """
    folder = parent / _UNSAFE.sub("_", worker_id)
    parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        # Nobody makes or takes a spool meanwhile, so what is not locked has no owner who is about to lock it.
        with _locked(parent, os.O_CREAT, wait=True):
            folder.mkdir(exist_ok=True)
            try:
                held.enter_context(_locked(folder, os.O_CREAT))
            except BlockingIOError as error:
                msg = f"another worker uses {folder}: give each its own LATENTMILL_WORKER_ID or LATENTMILL_SPOOL_DIR"
                raise SpoolTakenError(msg) from error
            _empty(folder)
            _remove_abandoned(parent)
        yield folder


@contextmanager
def _locked(folder: Path, flags: int = 0, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder. Raises BlockingIOError when another process does, and there shall be no waiting."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    with os.scandir(parent) as entries:
        folders = [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
    for folder in folders:
        # Held, without a lock and so none of ours, with something else in it, or another user's: it stays.
        with suppress(OSError), _locked(folder):
            _empty(folder)
            (folder / _LOCK).unlink()
            folder.rmdir()
            log.info("abandoned_spool_removed", folder=str(folder))


def _empty(folder: Path) -> None:
    for leftover in folder.glob("*.mp4*"):
        leftover.unlink()
