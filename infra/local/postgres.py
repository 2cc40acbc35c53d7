"""The part `postgres`: a cluster with one password, whose server never runs as root."""

import os
import pwd
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGINT

from infra.local import binaries, probes
from infra.local.layout import Layout, private_folder, write_private
from infra.local.part import Launch, Part, StackError
from infra.local.plan import DATABASE, USER, Plan, server_environment

# Users that a root-owned stack may run Postgres as. The first is there where Debian's own Postgres is installed.
UNPRIVILEGED = ("postgres", "nobody")
# Of that user's, beside it what the caller writes for him.
HOME = "postgres"
# initdb takes 2 s on an idle machine.
SETUP_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where Postgres keeps its data, where its programs are and who runs them (None: the caller).

    That user owns `home` and could put a link for any name in it. So the caller writes to `place` above it.
    """

    place: Path
    home: Path
    programs: Path
    user: str | None

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.home / "data"


def part(plan: Plan) -> Part:
    """Return the part. It stops on SIGINT: SIGTERM would wait for the last client to leave."""
    ready = partial(probes.answers_postgres, plan.database_url())
    return Part("postgres", lambda: _launch(plan), ready, stop_signal=SIGINT)


def remove_outside_data(layout: Layout) -> None:
    """Remove Postgres' folders when they lie outside the stack directory."""
    if layout.postgres_place.exists():
        shutil.rmtree(layout.postgres_place.read_text(), ignore_errors=True)
        layout.postgres_place.unlink()


def _launch(plan: Plan) -> Launch:
    cluster = _cluster(plan.layout)
    environment = server_environment(cluster.home)
    if not (cluster.data / "PG_VERSION").exists():
        _initialise(plan, cluster, environment)
    argv = (
        str(cluster.programs / "postgres"),
        f"-D{cluster.data}",
        f"-p{plan.ports['postgres']}",
        "-clisten_addresses=127.0.0.1",
        # Loopback only: the path of a socket in a deep checkout would exceed the 107 bytes the kernel allows.
        "-cunix_socket_directories=",
        # Two apis, the dispatcher, workers and tests with pools of their own; 100 is Postgres' default.
        "-cmax_connections=200",
    )
    return Launch(argv, cluster.home, environment, cluster.user)


def _cluster(layout: Layout) -> Cluster:
    if os.getuid() != 0:
        return Cluster(layout.data, private_folder(layout.data / HOME), binaries.postgres_folders()[0], None)
    user = _unprivileged_user()
    place = _place(layout, user)
    home = private_folder(place / HOME)
    shutil.chown(home, user, pwd.getpwnam(user).pw_gid)
    return Cluster(place, home, _reachable_programs(place, user), user)


def _unprivileged_user() -> str:
    known = {entry.pw_name for entry in pwd.getpwall()}
    for name in UNPRIVILEGED:
        if name in known:
            return name
    message = f"postgres: it refuses to run as root, and this machine has none of the users {UNPRIVILEGED}"
    raise StackError(message)


def _place(layout: Layout, user: str) -> Path:
    """Return a folder of the caller's that `user` can pass: the stack's, or where a parent is closed, one in /tmp."""
    if layout.postgres_place.exists() and Path(layout.postgres_place.read_text()).is_dir():
        return Path(layout.postgres_place.read_text())
    if _can(user, "-x", layout.data):
        return layout.data
    place = Path(tempfile.mkdtemp(prefix="latentmill-postgres-"))
    place.chmod(0o711)
    write_private(layout.postgres_place, str(place))
    return place


def _reachable_programs(place: Path, user: str) -> Path:
    """Return the first folder of programs, or a copy of it where `user` cannot reach it, as under a closed home.

    A system's own Postgres lies open, so only the wheel's, which needs nothing around it, is ever copied.
    """
    folder = binaries.postgres_folders()[0]
    return folder if _can(user, "-x", folder / "postgres") else _copied_programs(folder, place)


def _copied_programs(folder: Path, place: Path) -> Path:
    """Copy the wheel's Postgres (42 MB) into a folder that everybody can pass; return its folder of programs."""
    package = folder.parents[1]
    target = place / "postgres-server"
    programs = target / folder.relative_to(package.parent)
    if not _is_copy(folder / "postgres", programs / "postgres"):
        shutil.rmtree(target, ignore_errors=True)
        # The wheel's libraries lie beside its package, where the programs look for them (macOS has them inside). The
        # programs come last, so that a copy which was cut short is seen.
        libraries = package.with_name(f"{package.name}.libs")
        target.mkdir(mode=0o755)
        if libraries.exists():
            shutil.copytree(libraries, target / libraries.name, symlinks=True)
        shutil.copytree(package, target / package.name, symlinks=True, ignore=shutil.ignore_patterns("bin"))
        shutil.copytree(folder, programs, symlinks=True)
    return programs


def _is_copy(original: Path, copy: Path) -> bool:
    if not copy.exists():
        return False
    first, second = original.stat(), copy.stat()
    return (first.st_size, first.st_mtime_ns) == (second.st_size, second.st_mtime_ns)


def _can(user: str, test: str, path: Path) -> bool:
    # The kernel's answer, made as that user: mode bits alone would miss access lists and mount options.
    entry = pwd.getpwnam(user)
    asked = subprocess.run(  # noqa: S603
        ["test", test, str(path)],  # noqa: S607
        cwd="/",
        user=entry.pw_uid,
        group=entry.pw_gid,
        extra_groups=[],
        check=False,
    )
    return asked.returncode == 0


def _initialise(plan: Plan, cluster: Cluster, environment: dict[str, str]) -> None:
    """Make the cluster and its database. A folder of half a cluster is removed first."""
    shutil.rmtree(cluster.data, ignore_errors=True)
    # A key of an earlier database would be refused by this one.
    plan.layout.api_key.unlink(missing_ok=True)
    password = cluster.place / "postgres-password"
    write_private(password, plan.credentials.postgres, pwd.getpwnam(cluster.user).pw_uid if cluster.user else None)
    # Set up beside its final name: a folder called `data` is always whole.
    making = cluster.home / "making"
    shutil.rmtree(making, ignore_errors=True)
    programs = cluster.programs
    options = ("--auth=scram-sha-256", f"--pwfile={password}", "--encoding=UTF8", "--no-locale", "--no-instructions")
    _run((str(programs / "initdb"), f"-D{making}", f"-U{USER}", *options), cluster.home, environment, cluster.user)
    password.unlink()
    create = (str(programs / "postgres"), "--single", f"-D{making}", "postgres")
    _run(create, cluster.home, environment, cluster.user, f'CREATE DATABASE "{DATABASE}";\n')
    making.replace(cluster.data)


def _run(
    argv: tuple[str, ...], cwd: Path, environment: dict[str, str], user: str | None, standard_input: str = ""
) -> None:
    entry = pwd.getpwnam(user) if user is not None else None
    done = subprocess.run(  # noqa: S603
        argv,
        cwd=cwd,
        env=environment,
        user=entry.pw_uid if entry else None,
        group=entry.pw_gid if entry else None,
        extra_groups=[] if entry else None,
        input=standard_input,
        capture_output=True,
        text=True,
        timeout=SETUP_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        program = Path(argv[0]).name
        message = f"postgres: {program} failed with exit status {done.returncode}\n{done.stdout}{done.stderr}"
        raise StackError(message)
