"""What a caller may choose about a stack."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_DIRECTORY = REPOSITORY / ".stack"


@dataclass(frozen=True, slots=True)
class StackOptions:
    """A stack's directory and its processes.

    `apps=False` leaves only the five servers. `worker_env`, `api_env` and `dispatcher_env` are added to the
    environment of those processes and win over what the stack sets. `connections_per_address` is how many requests,
    streams and sockets nginx serves one address at a time; a load test from one machine needs more.
    """

    directory: Path = DEFAULT_DIRECTORY
    workers: int = 1
    apps: bool = True
    worker_env: Mapping[str, str] = field(default_factory=dict)
    api_env: Mapping[str, str] = field(default_factory=dict)
    dispatcher_env: Mapping[str, str] = field(default_factory=dict)
    # Everybody behind one company's NAT, and a tenth of the sockets that one api serves.
    connections_per_address: int = 500


def remember(path: Path, options: StackOptions) -> None:
    """Write down which parts the options ask for, so that `status` can name those that are missing."""
    path.write_text(json.dumps({"workers": options.workers, "apps": options.apps}), encoding="utf-8")


def remembered(path: Path, directory: Path) -> StackOptions:
    """Return what was written down last; the defaults when nothing was."""
    return StackOptions(directory, **(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}))
