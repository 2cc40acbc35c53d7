"""One stack: starts, watches and stops its parts, from this process or a later one."""

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Self

from infra.local import catalogue, postgres, process, rabbitmq, services
from infra.local.credentials import load_or_make
from infra.local.layout import Layout, write_private
from infra.local.options import DEFAULT_DIRECTORY, StackOptions, remember
from infra.local.part import Part, StackError
from infra.local.plan import Plan
from infra.local.ports import PortBook
from infra.local.startup import AbandonedError, OnReady, bring_up, by_depth, stop_needs

READY_POLL_S = 0.05
TAIL_LINES = 25
# The address that the settings name as default, for the checkout's own stack; where it is taken, another port is.
PREFERRED_PORTS = {"nginx": 8080}


def _silent(_part: str, _seconds: float) -> None:
    """Report nothing."""


class LocalStack:
    """The real servers and latentmill's processes in one directory.

    As a context manager it starts on entry and stops on exit; data, ports and passwords stay for the next start.
    Parts: postgres, redis, s3, epmd, rabbitmq, nginx, api-1, api-2, dispatcher, worker-1 ….
    Every method works from any process that names the same directory.
    """

    def __init__(self, options: StackOptions) -> None:
        self.options = options
        self.layout = Layout.at(options.directory)
        self.layout.create()
        own = self.layout.root == DEFAULT_DIRECTORY
        ports = PortBook(self.layout.ports, PREFERRED_PORTS if own else {})
        self._plan = Plan(self.layout, ports, load_or_make(self.layout.credentials), options)
        # Kept so that processes that this one started are reaped when they end.
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        """Start the stack."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the stack."""
        self.stop()

    @property
    def environment(self) -> Mapping[str, str]:
        """The LATENTMILL_* variables that any process of this stack needs. They hold passwords."""
        return self._plan.environment()

    @property
    def public_url(self) -> str:
        """Where clients reach the stack: nginx."""
        return self._plan.public_url()

    def port(self, name: str) -> int:
        """Return the port of a part on 127.0.0.1, or of its metrics: "api-1", "worker-1.metrics"."""
        return self._plan.ports[name]

    def url(self, name: str) -> str:
        """Return the HTTP address of a part: "api-1" past nginx, "dispatcher.metrics"."""
        return f"http://127.0.0.1:{self.port(name)}"

    def start(self, on_ready: OnReady = _silent) -> None:
        """Start every part that does not run, side by side. On failure everything is stopped.

        Raises StackError with the part that failed and its last log lines.
        """
        with self._locked():
            remember(self.layout.options, self.options)
            self._refresh_ports()
            parts = [part for part in catalogue.parts(self._plan) if self.pid(part.name) is None]
            try:
                bring_up(parts, self._begin, on_ready)
            except BaseException:
                self._stop_all()
                raise

    def stop(self) -> None:
        """Stop every part, the last started first. Data stays."""
        with self._locked():
            self._stop_all()

    def destroy(self) -> None:
        """Stop, and remove all data, and the directory if nothing else lies in it.

        A RabbitMQ that was fetched into the checkout's own directory, and other stacks in it, stay.
        """
        self.stop()
        postgres.remove_outside_data(self.layout)
        self.layout.remove()

    def start_part(self, name: str, environment: Mapping[str, str] | None = None) -> None:
        """Start one part, also a worker or a dispatcher beyond those of the options, and wait until it serves.

        `environment` is added to that of an api, a dispatcher or a worker for this life. Raises StackError when it runs
        already or fails.
        """
        if self.pid(name) is not None:
            message = f"{name} runs already"
            raise StackError(message)
        try:
            self._begin(self._part(name, environment or {}), Event())
        except BaseException:
            self.kill_part(name)
            raise

    def stop_part(self, name: str) -> None:
        """Stop one part gracefully; it is killed when its grace is over. Nothing happens when it does not run."""
        part = self._part(name, {})
        record = process.load_record(self._record(name))
        if record is not None:
            process.terminate(record, part.stop_signal, part.grace_s)
        self._forget(name)
        _sweep(part.litter)

    def kill_part(self, name: str) -> None:
        """Kill one part and its children with SIGKILL."""
        record = process.load_record(self._record(name))
        if record is not None:
            process.kill(record)
        self._forget(name)
        _sweep(self._part(name, {}).litter)

    def pid(self, name: str) -> int | None:
        """Return the process that runs a part; None when it does not run."""
        record = process.load_record(self._record(name))
        return record.pid if record is not None and process.is_alive(record) else None

    def rabbitmqctl(self, *arguments: str) -> str:
        """Run RabbitMQ's own tool against the broker; return what it prints. Raises StackError when it fails."""
        return rabbitmq.control(self._plan, arguments)

    def log_tail(self, name: str, lines: int = TAIL_LINES) -> str:
        """Return the last lines of a part's log."""
        return process.tail(self.layout.log(name), lines)

    def status(self) -> dict[str, int | None]:
        """Return the process of each part that the options name or that was started besides; None for a dead one."""
        names = [part.name for part in catalogue.parts(self._plan) if part.ready is not None]
        return {name: self.pid(name) for name in [*names, *sorted(set(self._recorded()) - set(names))]}

    def api_key(self) -> str:
        """Return the API key of tenant `demo`, making it on the first call. Needs the database."""
        path = self.layout.api_key
        if not path.exists():
            write_private(path, services.make_api_key(self._plan))
        return path.read_text(encoding="utf-8").strip()

    def _part(self, name: str, environment: Mapping[str, str]) -> Part:
        return catalogue.part(self._plan, name, environment)

    def _refresh_ports(self) -> None:
        running = {name for name, pid in self.status().items() if pid is not None}
        ports = self._plan.ports
        ports.forget_taken([name for name in ports.names() if name.split(".")[0] not in running])

    def _begin(self, part: Part, abort: Event) -> None:
        try:
            child = process.spawn(part.launch(), self.layout.log(part.name))
        except OSError as error:
            message = f"{part.name} cannot be started: {error}"
            raise StackError(message) from error
        self._children[part.name] = child
        mark = process.birth_mark(child.pid)
        if mark is not None:
            process.save_record(self._record(part.name), process.Record(child.pid, mark))
        self._await_ready(part, child, abort)
        if part.ready is None:
            self._forget(part.name)

    def _await_ready(self, part: Part, child: subprocess.Popen[bytes], abort: Event) -> None:
        deadline = time.monotonic() + part.timeout_s
        while not abort.wait(READY_POLL_S):
            code = child.poll()
            if code is not None:
                if part.ready is None and code == 0:
                    return
                raise self._failure(part.name, f"ended with exit status {code}")
            if part.ready is not None and part.ready():
                return
            if time.monotonic() > deadline:
                raise self._failure(part.name, f"was not ready after {part.timeout_s:.0f} s")
        raise AbandonedError(part.name)

    def _failure(self, name: str, what: str) -> StackError:
        return StackError(f"{name} {what}; the end of {self.layout.log(name)}:\n{self.log_tail(name)}")

    def _stop_all(self) -> None:
        parts = [self._part(name, {}) for name in self._recorded()]
        for level in reversed(by_depth(parts, stop_needs)):
            with ThreadPoolExecutor(max_workers=len(level)) as pool:
                list(pool.map(self.stop_part, (part.name for part in level)))

    def _record(self, name: str) -> Path:
        return self.layout.records / f"{name}.json"

    def _recorded(self) -> list[str]:
        return [path.stem for path in self.layout.records.glob("*.json")]

    def _forget(self, name: str) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            child.wait()
        self._record(name).unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.layout.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _sweep(litter: tuple[Path, ...]) -> None:
    """Remove what a part left, as far as it is this user's: the names are predictable, and anybody could use them."""
    for path in litter:
        with suppress(FileNotFoundError):
            if path.lstat().st_uid == os.geteuid():
                path.unlink()
