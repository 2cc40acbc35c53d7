"""One GPU for one worker: the first that no other worker of this machine holds, by a lock on a file named by its UUID.

Replicas of one service all see the same devices, and nobody tells them apart. The kernel gives a lock back when its
process ends, however that was, so a GPU is never lost to a worker that crashed.
"""

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

log = structlog.get_logger()


class GpuClaimError(RuntimeError):
    """No GPU could be claimed; the message says what to do."""


def choices(uuids: Sequence[str], visible: str | None) -> list[str]:
    """The devices that CUDA_VISIBLE_DEVICES, when it is set, leaves of the machine's `uuids`. Raises GpuClaimError.

    Numbers count in PCI order. MIG instances may be named; the machine's `uuids` do not list them.
    """
    if visible is None:
        return list(uuids)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not names:
        msg = "LATENTMILL_GPU=auto: CUDA_VISIBLE_DEVICES is empty and so hides every GPU; unset it or name some"
        raise GpuClaimError(msg)
    return list(dict.fromkeys(_resolve(name, uuids) for name in names))


def _resolve(name: str, uuids: Sequence[str]) -> str:
    if name.isdecimal():
        found = list(uuids[int(name) : int(name) + 1])
    elif name.startswith("MIG-"):
        found = [name]
    else:  # CUDA takes the beginning of a UUID, too
        found = [uuid for uuid in uuids if uuid.startswith(name)]
    if len(found) != 1:
        msg = f"CUDA_VISIBLE_DEVICES: {name!r} is no GPU of this machine; it has {', '.join(uuids)}"
        raise GpuClaimError(msg)
    return found[0]


@contextmanager
def claim_gpu(uuids: Sequence[str], folder: Path) -> Iterator[str]:
    """Hold the first free GPU of `uuids`, and have every CUDA process that is started now see that one alone.

    The engine child does not get the lock: it would keep the GPU from the next worker when this one is killed. Raises
    GpuClaimError.
    """
    try:
        with _opened(folder) as locks:
            held = _first_free(uuids, locks)
    except OSError as error:
        msg = f"LATENTMILL_GPU_LOCK_DIR: {folder} cannot be used for locks: {error.strerror}"
        raise GpuClaimError(msg) from error
    if held is None:
        msg = (
            f"LATENTMILL_GPU=auto: all {len(uuids)} GPUs are claimed by other workers (locks in {folder}); "
            "run no more workers than there are GPUs"
        )
        raise GpuClaimError(msg)
    uuid, lock = held
    try:
        os.environ |= {"CUDA_VISIBLE_DEVICES": uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        log.info("gpu_claimed", gpu=uuid, gpus=len(uuids))
        yield uuid
    finally:
        os.close(lock)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """The folder, which no stranger may have prepared: who can open a lock file can hold it, or take it away."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
            msg = (
                f"LATENTMILL_GPU_LOCK_DIR: {folder} must belong to this user or root, and not everybody may write there"
            )
            raise GpuClaimError(msg)
        yield descriptor
    finally:
        os.close(descriptor)


def _first_free(uuids: Sequence[str], folder: int) -> tuple[str, int] | None:
    """A GPU and the descriptor of its lock, which Python opens as one that no child inherits."""
    for uuid in uuids:
        lock = os.open(f"{_file_name(uuid)}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return uuid, lock
    return None


def _file_name(uuid: str) -> str:
    # The old names of MIG instances have slashes in them.
    return uuid.replace("/", "_")
