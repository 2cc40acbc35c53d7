"""Points at which a fault test stops a process, so that a kill lands exactly there. For tests only.

Without LATENTMILL_FAULT_POINTS a point does nothing. With it, that folder says which points are armed: a file named like
the point. The first process that reaches the point renames the file to `point.PID` and stands still until the file is
removed, or the process is killed.
"""

import os
import stat
import time
from pathlib import Path

_VARIABLE = "LATENTMILL_FAULT_POINTS"
_LOOK_S = 0.01


def _armed_folder() -> Path | None:
    """The folder of the variable; None without one. Raises RuntimeError where others could stop this process."""
    name = os.environ.get(_VARIABLE)
    if not name:
        return None
    folder = Path(name)
    found = folder.lstat() if folder.exists() else None
    private = found is not None and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if found is None or not private or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        msg = f"{_VARIABLE} is for tests: it must name a folder of this user's that nobody else can write to"
        raise RuntimeError(msg)
    return folder


_FOLDER = _armed_folder()


def reached(point: str) -> None:
    """Stand still here when a test has armed this point. It blocks the whole thread, an event loop's as well."""
    if _FOLDER is None:
        return
    stopped = _FOLDER / f"{point}.{os.getpid()}"
    try:
        (_FOLDER / point).rename(stopped)
    except FileNotFoundError:
        return
    while stopped.exists():
        time.sleep(_LOOK_S)
