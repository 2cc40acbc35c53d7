"""The development container's reload: a changed source is run anew, a broken one waits to be mended."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest

from tests.conftest import REPOSITORY

SERVICE = "import signal\nprint('{word}', flush=True)\nsignal.pause()\n"
PATIENCE_S = 60


class Reloaded:
    """A module `service` that is kept running, and what it and the reload say."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "service" / "__main__.py"
        self.source.parent.mkdir()
        self.write(SERVICE.format(word="first"))
        command = [sys.executable, "-m", "infra.docker.reload", "service", str(folder / "service")]
        path = os.pathsep.join(map(str, (REPOSITORY, folder)))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def write(self, text: str) -> None:
        fresh = self.source.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.source)

    def wait_for(self, text: str) -> None:
        while text not in self._lines.get(timeout=PATIENCE_S):
            pass


@pytest.fixture
def reloaded(tmp_path: Path) -> Iterator[Reloaded]:
    running = Reloaded(tmp_path)
    running.wait_for("first")
    yield running
    running.process.terminate()
    running.process.wait(PATIENCE_S)


def test_a_change_starts_the_module_anew(reloaded: Reloaded) -> None:
    reloaded.write(SERVICE.format(word="second"))
    reloaded.wait_for("second")


def test_a_new_file_is_a_change(reloaded: Reloaded) -> None:
    (reloaded.source.parent / "part.py").touch()
    reloaded.wait_for("service starts anew")
    reloaded.wait_for("first")


def test_a_source_that_does_not_run_waits_until_it_is_mended(reloaded: Reloaded) -> None:
    reloaded.write("def broken(")
    reloaded.wait_for("SyntaxError")
    reloaded.write(SERVICE.format(word="mended"))
    reloaded.wait_for("mended")


def test_a_service_that_does_not_leave_is_killed(reloaded: Reloaded) -> None:
    stubborn = "import signal\nfor end in (signal.SIGTERM, signal.SIGINT):\n    signal.signal(end, signal.SIG_IGN)\n"
    reloaded.write(stubborn + SERVICE.format(word="stubborn"))
    reloaded.wait_for("stubborn")
    reloaded.write(SERVICE.format(word="next"))
    reloaded.wait_for("next")


def test_sigterm_reaches_the_service_and_ends_both(reloaded: Reloaded) -> None:
    reloaded.process.send_signal(signal.SIGTERM)
    assert reloaded.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
