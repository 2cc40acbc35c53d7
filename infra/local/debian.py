"""RabbitMQ on Debian and Ubuntu without root: the release's own packages, unpacked into a folder."""

import fcntl
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.local.part import StackError

SERVER = "usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server"
ADVICE = "install RabbitMQ (`apt-get install rabbitmq-server`, `brew install rabbitmq`) so that it is on PATH"
# 45 MB of packages and 9 MB of lists: minutes on a slow line, and apt itself waits two minutes for a mirror.
APT_TIMEOUT_S = 600


def fetched_server(folder: Path) -> Path:
    """Return the RabbitMQ start script in `folder`, fetching and unpacking it on the first call.

    Takes about 6 s and 45 MB the first time. Raises StackError where this cannot work or the download fails.
    """
    with _only_one(folder.with_name(folder.name + ".lock")):
        if not folder.exists():
            _fetch(folder)
    return next(iter(folder.glob(SERVER)))


def _fetch(folder: Path) -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        message = f"rabbitmq: not found, and only Debian and Ubuntu let it be fetched; {ADVICE}"
        raise StackError(message)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="rabbitmq-fetch-") as name:
        work = Path(name)
        options = _private_apt(work)
        _run(["apt-get", *options, "-qq", "update"], work)
        _run(["apt-get", *options, "-qq", "download", *_packages(options, work)], work)
        unpacked = work / "root"
        for package in sorted(work.glob("*.deb")):
            _run(["dpkg-deb", "-x", package.name, str(unpacked)], work)
        _make_relocatable(unpacked)
        # Moved into place last, so that a folder with this name is always whole.
        unpacked.replace(folder)


def _make_relocatable(unpacked: Path) -> None:
    """Let Erlang's launchers take their root from ERL_ROOTDIR; Debian's have /usr/lib/erlang written in."""
    erlang = unpacked / "usr/lib/erlang"
    for launcher in (*erlang.glob("bin/*"), *erlang.glob("erts-*/bin/*")):
        if launcher.name in {"erl", "start"} and not launcher.is_symlink():
            text = launcher.read_text().replace("ROOTDIR=/usr/lib/erlang", 'ROOTDIR="$ERL_ROOTDIR"')
            launcher.write_text(text)


def _private_apt(work: Path) -> list[str]:
    """Return options that keep apt's state in `work` and name only the distribution's own sources."""
    for folder in ("lists/partial", "cache/archives/partial", "sources"):
        (work / folder).mkdir(parents=True)
    etc = Path("/etc/apt")
    own = [etc / "sources.list", *(etc / "sources.list.d").glob("*.sources"), *(etc / "sources.list.d").glob("*.list")]
    # A third party's source may need a login or be down, and RabbitMQ is not there.
    for source in own:
        if source.exists() and source.stem in {"sources", "debian", "ubuntu"}:
            shutil.copy(source, work / "sources" / source.name)
    return [
        f"-oDir::State::lists={work}/lists",
        f"-oDir::Cache={work}/cache",
        "-oDir::Etc::sourcelist=/dev/null",
        f"-oDir::Etc::sourceparts={work}/sources",
        # apt would hand downloads to its user _apt, who cannot enter this folder.
        "-oAPT::Sandbox::User=root",
        "-oAcquire::Retries=2",
    ]


def _packages(options: list[str], work: Path) -> list[str]:
    """Return rabbitmq-server and the Erlang packages it stands on; the C libraries come with the system."""
    leave_out = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    listed = _run(["apt-cache", *options, "depends", "--recurse", *leave_out, "rabbitmq-server"], work)
    return sorted({line for line in listed.splitlines() if line.startswith(("erlang-", "rabbitmq-server"))})


def _run(argv: list[str], work: Path) -> str:
    try:
        done = subprocess.run(argv, cwd=work, capture_output=True, text=True, timeout=APT_TIMEOUT_S, check=True)  # noqa: S603
    except subprocess.CalledProcessError as error:
        message = f"rabbitmq: `{argv[0]} {argv[-1]}` failed; {ADVICE}\n{error.stderr.strip()}"
        raise StackError(message) from error
    except subprocess.TimeoutExpired as error:
        message = f"rabbitmq: `{argv[0]}` took longer than {APT_TIMEOUT_S} s; {ADVICE}"
        raise StackError(message) from error
    return done.stdout


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Let one process at a time fetch: stacks of the same checkout share the folder."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
