"""What one part of the stack is, as values: how it is launched, when it is ready, how it is stopped."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM, Signals


class StackError(Exception):
    """A part of the stack failed. The text names the part and ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One process to start. Secrets travel in `environment` or in files, never in `argv`."""

    argv: tuple[str, ...]
    cwd: Path
    environment: Mapping[str, str] = field(repr=False)
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One server or process of the stack.

    `launch` writes what the process needs and returns how to start it; it may take seconds and runs on a thread.
    `ready` answers whether the process serves; None marks a task that is done when it exits with 0.
    `needs` names the parts that must be ready before this one is launched; `uses` those that it can wait for by itself
    but that must be there until it has stopped.
    """

    name: str
    launch: Callable[[], Launch]
    ready: Callable[[], bool] | None
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    # A server starts within seconds; a minute leaves room for a machine that is busy with other work.
    timeout_s: float = 60
    stop_signal: Signals = SIGTERM
    grace_s: float = 10
    # Files that the process makes outside the stack's directory and does not always remove itself.
    litter: tuple[Path, ...] = ()
