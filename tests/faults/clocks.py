"""Processes with a wrong clock, by libfaketime (Debian's package faketime)."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.faults.fault import SkippedError

_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/faketime/libfaketimeMT.so.1",
)


@contextlib.contextmanager
def shifted_clock(seconds: int) -> Iterator[dict[str, str]]:
    """The environment of a process whose wall clock is off by so many seconds. Raises SkippedError without faketime."""
    library = next((path for path in _LIBRARIES if Path(path).exists()), None)
    if library is None:
        raise SkippedError("libfaketime is not installed (Debian: apt-get install faketime)")
    # Waits and timeouts are measured on the monotonic clock, which a step of the time does not change.
    yield {"LD_PRELOAD": library, "FAKETIME": f"{seconds:+d}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
