import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGTERM

import pytest

from infra.local import process
from infra.local.part import Launch

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
WITH_CHILD = (
    "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); import signal; signal.pause()"
)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes to end after a test, whatever became of it."""
    children: list[subprocess.Popen[bytes]] = []
    yield children
    for child in children:
        child.kill()
        child.wait()


def start(code: str, log: Path, started: list[subprocess.Popen[bytes]]) -> process.Record:
    """Start Python code that prints a line when it is up, and wait for that line."""
    child = process.spawn(Launch((sys.executable, "-c", code), log.parent, dict(os.environ)), log)
    started.append(child)
    while not process.tail(log, 1):
        assert child.poll() is None
    mark = process.birth_mark(child.pid)
    assert mark is not None
    return process.Record(child.pid, mark)


def test_this_process_is_recognised() -> None:
    mark = process.birth_mark(os.getpid())

    assert mark is not None
    assert process.is_alive(process.Record(os.getpid(), mark))


def test_a_stranger_with_the_same_number_is_not_taken_for_the_part() -> None:
    assert not process.is_alive(process.Record(os.getpid(), "another boot/1"))


def test_a_stranger_with_the_same_number_is_never_signalled() -> None:
    process.terminate(process.Record(os.getpid(), "another boot/1"), SIGTERM, 1)


def test_a_process_that_was_not_reaped_yet_counts_as_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert process.birth_mark(child.pid) is None
    child.wait()


def test_a_process_has_a_session_of_its_own(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    record = start("print('up', flush=True); import signal; signal.pause()", tmp_path / "log", started)

    assert os.getsid(record.pid) == record.pid


def test_a_process_that_ignores_the_signal_is_killed_after_its_grace(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    record = start(STUBBORN, tmp_path / "log", started)

    process.terminate(record, SIGTERM, grace_s=0.1)

    assert not process.is_alive(record)


def test_children_die_with_their_process(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    log = tmp_path / "log"
    record = start(WITH_CHILD, log, started)
    grandchild = int(process.tail(log, 1))

    process.kill(record)

    started[0].wait()
    while process.birth_mark(grandchild) is not None:
        pass


def test_a_record_survives_its_writer(tmp_path: Path) -> None:
    record = process.Record(42, "boot/7")

    process.save_record(tmp_path / "part.json", record)

    assert process.load_record(tmp_path / "part.json") == record


def test_the_tail_is_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(1000)))

    assert process.tail(log, 2) == "line 998\nline 999"


def test_only_a_large_log_is_moved_aside(tmp_path: Path) -> None:
    small, large = tmp_path / "small.log", tmp_path / "large.log"
    small.touch()
    large.touch()
    os.truncate(large, process.LOG_LIMIT_BYTES + 1)

    process.move_aside(small)
    process.move_aside(large)

    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["large.log.1", "small.log"]
