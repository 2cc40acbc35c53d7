"""The test's side of common/faults.py: arm a point, wait until a process stands there, kill it or let it go."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path


class FaultPoints:
    """The folder that the processes of a farm look into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Make the folder, closed to everybody else."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def armed(self, point: str) -> Iterator[Callable[[], int]]:
        """Arm a point; what it gives waits for a process to stand there and returns its pid. Lets it go at the end."""
        (self.folder / point).touch()
        try:
            yield lambda: self._await(point)
        finally:
            self.release(point)

    def release(self, point: str) -> None:
        """Disarm the point and let whoever stands there go on."""
        for path in self.folder.glob(f"{point}*"):
            path.unlink(missing_ok=True)

    def release_all(self) -> None:
        """The same for every point."""
        self.release("")

    def remove(self) -> None:
        """Remove the folder."""
        if self.folder.exists():
            self.release_all()
            self.folder.rmdir()

    def _await(self, point: str, within_s: float = 30.0) -> int:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            stopped = next(self.folder.glob(f"{point}.*"), None)
            if stopped is not None:
                return int(stopped.name.rsplit(".", 1)[1])
            time.sleep(0.01)
        message = f"no process reached {point} in {within_s:g} s"
        raise AssertionError(message)
