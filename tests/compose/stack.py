"""A compose stack of this test run alone: its own project, its own port, nothing of it left behind."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from infra.local.ports import choose
from tests.compose.report import Report
from tests.conftest import REPOSITORY

OWN_SETTINGS = REPOSITORY / "tests/compose/tests.yml"
SYNTHETIC = REPOSITORY / "infra/docker/synthetic.yml"
# Compose calls a container by its short id, and so do the names of workers and dispatchers that it hosts.
HOSTNAME_CHARS = 12
COMMAND_TIMEOUT_S = 120
UP_TIMEOUT_S = 240
TAIL_LINES = 15


class CommandFailedError(AssertionError):
    """A command of docker's ended badly. The text holds what it said."""


@dataclass(frozen=True, slots=True)
class Container:
    """What `docker inspect` says of one container."""

    facts: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.facts["Id"])

    @property
    def hostname(self) -> str:
        return self.id[:HOSTNAME_CHARS]

    @property
    def name(self) -> str:
        return str(self.facts["Name"]).removeprefix("/")

    @property
    def service(self) -> str:
        return str(self.facts["Config"]["Labels"]["com.docker.compose.service"])

    def address_in(self, network: str) -> str:
        return str(self.facts["NetworkSettings"]["Networks"][network]["IPAddress"])


def docker(*arguments: str, stdin: str | None = None, within_s: float = COMMAND_TIMEOUT_S) -> str:
    """Run a command of docker's; what it printed. Raises CommandFailedError."""
    return _run(["docker", *arguments], dict(os.environ), stdin, within_s)


def _run(command: Sequence[str], environment: Mapping[str, str], stdin: str | None, within_s: float) -> str:
    try:
        ended = subprocess.run(
            command,
            env=environment,
            cwd=REPOSITORY,
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        message = f"{' '.join(command)}: not done after {within_s:.0f} s\n{error.stderr!r}"
        raise CommandFailedError(message) from error
    if ended.returncode:
        message = f"{' '.join(command)}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}"
        raise CommandFailedError(message)
    return ended.stdout


def inspect(*ids: str) -> list[Container]:
    return [Container(facts) for facts in json.loads(docker("inspect", *ids))] if ids else []


class ComposeStack:
    """The stack of docker-compose.yml. `scale` says how many containers each service gets at the next `up`."""

    def __init__(self, report: Report) -> None:
        self.project = f"latentmill-test-{os.getpid()}"
        self.port = choose(())
        self.scale: dict[str, int] = {}
        self.api_key = ""
        self.use_real_workers()
        self._report = report
        self._logs = REPOSITORY / ".stack" / "test-compose"
        shutil.rmtree(self._logs, ignore_errors=True)
        self._logs.mkdir(parents=True)

    @property
    def public_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def _environment(self) -> dict[str, str]:
        """The caller's environment without what would make another stack of this one."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("LATENTMILL_", "COMPOSE_"))}
        return own | {"COMPOSE_PROJECT_NAME": self.project, "LATENTMILL_PORT": str(self.port)}

    def compose(self, *arguments: str, stdin: str | None = None, within_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run a command of compose's; what it printed. Raises CommandFailedError."""
        files = [f"--file={file}" for file in (REPOSITORY / "docker-compose.yml", *self._files)]
        command = ["docker", "compose", "--env-file=/dev/null", *files, *arguments]
        environment = self._environment | {"LATENTMILL_API_KEY": self.api_key}
        return _run(command, environment, stdin, within_s)

    def use_real_workers(self) -> None:
        """From the next command on."""
        self._files = [OWN_SETTINGS]

    def use_synthetic_workers(self) -> None:
        """From the next command on."""
        self._files = [SYNTHETIC, OWN_SETTINGS]

    def up(self) -> None:
        """Start what does not run, as `docker compose up -d --wait` does. Raises CommandFailedError."""
        scale = [f"--scale={service}={count}" for service, count in self.scale.items()]
        self.compose("up", "--detach", "--wait", *scale, within_s=UP_TIMEOUT_S)

    def down(self) -> None:
        """Remove all containers; volumes stay."""
        self.save_logs()
        self.compose("down", within_s=UP_TIMEOUT_S)

    def destroy(self) -> None:
        """Remove everything, whatever state it is in."""
        try:
            self.save_logs()
        finally:
            self.compose(
                "--profile=tools", "down", "--volumes", "--remove-orphans", "--timeout=5", within_s=UP_TIMEOUT_S
            )

    def containers(self, service: str | None = None, *, ended: bool = False) -> list[Container]:
        """The running containers, of one service or of all; also those that ended, when asked."""
        which = [*(["--all"] if ended else []), *([service] if service else [])]
        return inspect(*self.compose("ps", "--quiet", *which).split())

    def exit_codes(self) -> dict[str, int]:
        """How the tasks of a start ended, by service."""
        ended = [c for c in self.containers(ended=True) if not c.facts["State"]["Running"]]
        return {task.service: int(task.facts["State"]["ExitCode"]) for task in ended}

    def python(self, service: str, program: str) -> str:
        """Run a Python program inside a running container; what it printed."""
        return self.compose("exec", "-T", service, "python", "-", stdin=program)

    def make_key(self, tenant: str) -> str:
        """A new API key, by the documented command."""
        command = ["run", "--rm", "-T", "keys", "create", "--tenant", tenant, "--name", "test", "--quiet"]
        return self.compose(*command).strip()

    def volume(self, name: str) -> str:
        return f"{self.project}_{name}"

    def network(self, name: str) -> str:
        return f"{self.project}_{name}"

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note in the report how long the block took."""
        began = time.monotonic()
        yield
        self.note(what, f"{time.monotonic() - began:.1f} s")

    def note(self, what: str, value: str) -> None:
        self._report.note(what, value)

    def logs(self) -> str:
        """What all containers have logged since the last `up` from nothing."""
        return self.compose("logs", "--no-color", "--timestamps")

    def save_logs(self) -> None:
        """Keep the logs of the containers that are about to go, in a file for each life of the stack."""
        if text := self.logs():
            life = len(list(self._logs.iterdir())) + 1
            (self._logs / f"life-{life}.log").write_text(text, encoding="utf-8")

    def saved_logs(self) -> list[Path]:
        return sorted(self._logs.iterdir())


def tail_of_each_service(log: Path) -> str:
    """The last lines of each container in a file of saved logs."""
    lines: dict[str, list[str]] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        lines.setdefault(line.partition("|")[0].strip(), []).append(line)
    return "\n".join(line for container in sorted(lines) for line in lines[container][-TAIL_LINES:])
