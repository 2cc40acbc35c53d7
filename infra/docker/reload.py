"""Run a module, and start it anew whenever its source changes: `python -m infra.docker.reload MODULE FOLDER...`.

For development, in a container that has the checkout mounted. It compares the files' times every half second, since not
every machine tells a container of changes to what is mounted in it.
"""

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_EVERY_S = 0.5
# A worker gives its batch back at a second signal.
_PATIENCE_S = 3.0


def snapshot(folders: Sequence[Path]) -> dict[Path, int]:
    """The Python files in the folders, and when each was changed."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*.py"):
            try:
                found[path] = path.stat().st_mtime_ns
            except FileNotFoundError:  # an editor replaces files
                continue
    return found


def run(module: str, folders: Sequence[Path]) -> int:
    """Keep the module running until SIGTERM or SIGINT; its exit code. One that ended waits for a change."""
    leaving = threading.Event()

    def leave(_number: int, _frame: FrameType | None) -> None:
        leaving.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    while True:
        seen = snapshot(folders)
        process = subprocess.Popen([sys.executable, "-m", module])  # noqa: S603  a module of ours
        while not leaving.wait(_EVERY_S) and snapshot(folders) == seen:
            process.poll()  # so that one that failed is no zombie until the next change
        if leaving.is_set():
            process.terminate()
            code = process.wait()
            return code if code >= 0 else 128 - code  # killed by a signal, as a shell tells it
        print(f"reload: {module} starts anew", file=sys.stderr, flush=True)
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    for end in (process.terminate, process.terminate, process.kill):
        end()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            continue
        return


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], [Path(folder) for folder in sys.argv[2:]]))
