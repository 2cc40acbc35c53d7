"""Processes that outlive their starter: started in a group of their own, recorded, recognised, stopped."""

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.local.layout import write_private
from infra.local.part import Launch

POLL_S = 0.02
# The log of one part is moved aside at its start when it has grown past this, so that two lives always fit on disk.
LOG_LIMIT_BYTES = 20_000_000


@dataclass(frozen=True, slots=True)
class Record:
    """A process and the mark of its birth: the number alone may belong to a stranger by now."""

    pid: int
    mark: str


def birth_mark(pid: int) -> str | None:
    """Return what tells this process from later ones with its number; None when it is gone or a zombie."""
    if sys.platform == "linux":
        return _linux_mark(pid)
    shown = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)  # noqa: S603, S607
    state, _, started = shown.stdout.strip().partition(" ")
    return started.strip() if started and not state.startswith("Z") else None


def _linux_mark(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses and may hold spaces and parentheses itself.
    values = stat[stat.rindex(")") + 2 :].split()
    state, started_ticks = values[0], values[19]
    if state in "ZX":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{started_ticks}"


def is_alive(record: Record) -> bool:
    """Tell whether the recorded process itself still runs."""
    return birth_mark(record.pid) == record.mark


def move_aside(log: Path) -> None:
    """Give a log that has grown large another name, in place of the one that had it."""
    if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
        log.replace(log.with_suffix(".log.1"))


def spawn(launch: Launch, log: Path) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that a terminal's Ctrl-C reaches only its starter."""
    move_aside(log)
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 - the stack's own commands
            launch.argv,
            cwd=launch.cwd,
            env=dict(launch.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            user=launch.user,
            group=None if launch.user is None else pwd.getpwnam(launch.user).pw_gid,
            extra_groups=None if launch.user is None else [],
        )


def save_record(path: Path, record: Record) -> None:
    """Remember which process runs a part."""
    write_private(path, json.dumps(asdict(record)))


def load_record(path: Path) -> Record | None:
    """Return the process that last ran a part, dead or alive."""
    return Record(**json.loads(path.read_text())) if path.exists() else None


def terminate(record: Record, stop_signal: signal.Signals, grace_s: float) -> None:
    """Ask a process to end; after `grace_s` seconds kill it. What is left of its group is killed either way.

    The signal goes to the process alone: a worker drains with its engine child, which must live until then.
    """
    if is_alive(record):
        with suppress(ProcessLookupError):
            os.kill(record.pid, stop_signal)
        _await_end(record, grace_s)
    kill(record)


def kill(record: Record) -> None:
    """Kill a process and all of its group at once, or what is left of the group when the process is gone."""
    if birth_mark(record.pid) not in {None, record.mark}:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(record.pid, signal.SIGKILL)
    _await_end(record, 5)


def _await_end(record: Record, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while is_alive(record) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def tail(log: Path, lines: int) -> str:
    """Return the last lines of a log; empty when there is none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - lines * 400))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
