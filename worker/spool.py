"""The folder where finished videos wait for their upload: one for each worker, held by a lock."""

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import structlog

from common import telemetry
from worker.spooled import note_of

# A dot at the beginning, too: such a name may lead out of the folder, or be that of a lock.
_UNSAFE = re.compile(r"^\.|[^A-Za-z0-9._-]")
_LOCK = ".lock"

log = structlog.get_logger()


class SpoolTakenError(RuntimeError):
    """Another process uses this worker's spool."""


@contextmanager
def open_spool(parent: Path, worker_id: str) -> Iterator[Path]:
    """Hold the spool of this worker for as long as it runs.

    Finished videos that earlier processes left, in it and in spools that nobody holds, lie in it then; what they did
    not finish is removed. Raises SpoolTakenError.
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
            _remove_unfinished(folder)
            _take_abandoned(parent, folder)
        yield folder


def has_room(folder: Path, most_bytes: int, least_free_bytes: int) -> bool:
    """Whether another video may be made: what waits is within its bound, and the disk has some space left."""
    try:
        waiting = sum(video.stat().st_size for video in folder.glob("*.mp4"))
        free = shutil.disk_usage(folder).free
    except OSError as error:  # a video was delivered just now, or the folder is gone
        log.warning("spool_not_readable", error=type(error).__name__, folder=str(folder))
        return folder.is_dir()
    telemetry.spool_bytes.set(waiting)
    return waiting < most_bytes and free >= least_free_bytes


@contextmanager
def _locked(folder: Path, flags: int = 0, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder. Raises BlockingIOError when another process does, and there shall be no waiting."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _take_abandoned(parent: Path, folder: Path) -> None:
    with os.scandir(parent) as entries:
        others = [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False) and Path(entry) != folder]
    for other in others:
        # Held, without a lock and so none of ours, with something else in it, or another user's: it stays.
        with suppress(OSError), _locked(other):
            for note in other.glob("*.json"):
                _move(note.with_suffix(".mp4"), folder)
                _move(note, folder)
            _remove_unfinished(other)
            (other / _LOCK).unlink()
            other.rmdir()
            log.info("abandoned_spool_taken", folder=str(other))


def _move(file: Path, folder: Path) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISREG(file.lstat().st_mode):
            file.rename(folder / file.name)


def _remove_unfinished(folder: Path) -> None:
    for partial in (*folder.glob("*.mp4?*"), *folder.glob("*.json?*")):
        partial.unlink()
    for video in folder.glob("*.mp4"):
        if not note_of(video).exists():
            video.unlink()
    for note in folder.glob("*.json"):
        if not note.with_suffix(".mp4").exists():
            note.unlink()
