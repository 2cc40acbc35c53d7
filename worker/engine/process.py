"""The parent's handle of the engine child: start it, run batches, notice within a second when it dies, replace it."""

import signal
import time
from collections.abc import Generator, Iterable, Iterator
from typing import cast

from worker.engine.base import Alive, Batch, BatchDone, Capabilities, EngineConfig, Event
from worker.engine.link import Link
from worker.engine.wire import Cancel, FramesAt, Interrupt, LoadFailed, Ready, Run, Stop

# The child looks at the deadline at every block and every chunk of the decode. What overruns it by this much is hung.
DEADLINE_GRACE_S = 15.0
# How often the clocks are looked at while the child is silent; its death needs no clock (the pipe closes).
_TICK_S = 0.2
# A dying child has closed its pipe already; a core dump may still be written.
_REAP_S = 5.0


class EngineError(RuntimeError):
    """The engine child is lost; start() makes a new one."""


class EngineStartError(EngineError):
    """The child could not load its model; the message ends with its last words."""


class ChildCrashedError(EngineError):
    """The child died. `exit_code` is negative for a signal; `last_words` are the last lines it wrote."""

    def __init__(self, exit_code: int, last_words: str) -> None:
        super().__init__(f"the engine child {_death(exit_code)}")
        self.exit_code = exit_code
        self.last_words = last_words


class EngineStalledError(EngineError):
    """Nothing was heard of the child for too long; it was killed."""


class EngineTimeoutError(EngineError):
    """The child overran the deadline; it was killed."""


def _death(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


class EngineProcess:
    """Owns at most one child. Use it from one thread; cancel and interrupt may come from any."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._link: Link | None = None
        self._last: Link | None = None
        self._running: str | None = None

    def start(self, timeout_s: float) -> Capabilities:
        """Start a child in place of the present one, have it load and warm up. Raises EngineStartError."""
        self.kill()
        if self._last is not None and self._last.process.poll() is None:
            msg = "the last engine child cannot be killed: its device hangs"
            raise EngineStartError(msg)
        until = time.monotonic() + timeout_s
        try:
            link = self._link = Link(self._config)
        except OSError as error:
            msg = f"no engine child could be started: {error}"
            raise EngineStartError(msg) from error
        self._last = link
        try:
            return self._await_ready(link, until)
        except (EOFError, OSError) as error:
            exit_code = link.close(_REAP_S)
            msg = f"the engine child {_death(exit_code)} while loading\n{link.last_words()}"
            raise EngineStartError(msg) from error
        finally:
            if not self.alive:
                self._link = None

    def _await_ready(self, link: Link, until: float) -> Capabilities:
        while (left := until - time.monotonic()) > 0:
            match link.receive(min(left, _TICK_S)):
                case Ready(capabilities):
                    return capabilities
                case LoadFailed(detail):
                    link.close(_REAP_S)
                    raise EngineStartError(detail.rstrip())
        link.close(0)
        msg = f"the model was not ready in time\n{link.last_words()}"
        raise EngineStartError(msg.rstrip())

    def run(
        self, batch: Batch, *, stall_s: float, deadline: float, grace_s: float = DEADLINE_GRACE_S
    ) -> Generator[Event, None, None]:
        """Send a batch and return its events, ending with BatchDone. Seconds; `deadline` on time.monotonic().

        The iterator raises ChildCrashedError, EngineStalledError or EngineTimeoutError; members without an outcome by
        then have none. Leaving it early kills the child.
        """
        if self._running is not None:
            msg = f"batch {self._running} is still running"
            raise RuntimeError(msg)
        link = self._link
        if link is None:
            msg = "no engine child: call start() first"
            raise EngineError(msg)
        self._running = batch.batch_id
        return self._events(link, Run(batch, deadline), stall_s, deadline + grace_s)

    def _events(self, link: Link, run: Run, stall_s: float, limit: float) -> Generator[Event, None, None]:
        done = False
        try:
            link.send(run)
            for event in self._listen(link, stall_s, limit):
                done = isinstance(event, BatchDone)
                if done:
                    self._running = None
                yield event
        except TimeoutError as error:
            raise EngineStalledError(str(error)) from error
        except (EOFError, OSError) as error:
            raise ChildCrashedError(link.close(_REAP_S), link.last_words()) from error
        finally:
            self._running = None
            if not done:
                self.kill()

    def _listen(self, link: Link, stall_s: float, limit: float) -> Iterator[Event]:
        heard = time.monotonic()
        while True:
            message = link.receive(_TICK_S)
            now = time.monotonic()
            if message is not None or link.waits_for_us:
                heard = now
            elif now - heard > stall_s:
                msg = f"the engine child was silent for {stall_s:g} s"
                raise EngineStalledError(msg)
            if now > limit:
                msg = "the engine child overran the deadline of its batch"
                raise EngineTimeoutError(msg)
            match message:
                case None | Alive():
                    continue
                case FramesAt():
                    yield link.lend(message)
                case BatchDone(_, healthy):
                    if not healthy:
                        self.kill()
                    yield message
                    return
                case _:
                    yield cast("Event", message)

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Drop jobs from the running batch, or from the next one. Returns at once."""
        self._tell(Cancel(frozenset(job_ids)))

    def interrupt(self) -> None:
        """Stop the running batch at the next block; its members come back as MemberInterrupted."""
        if (batch_id := self._running) is not None:
            self._tell(Interrupt(batch_id))

    def _tell(self, command: Cancel | Interrupt) -> None:
        link = self._link
        try:
            if link is not None:
                link.send(command)
        except OSError:
            return  # gone or hung: run() finds out and says so

    @property
    def alive(self) -> bool:
        """Whether a child is there to run batches."""
        return self._link is not None and self._link.process.poll() is None

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._link.process.pid if self._link is not None else None

    @property
    def frames_lent(self) -> int:
        """Chunks of frames that were handed out and not released yet."""
        return self._link.lent if self._link is not None else 0

    def stop(self, grace_s: float) -> None:
        """Let the child leave by itself for at most `grace_s`, then kill it."""
        link, self._link = self._link, None
        if link is None:
            return
        try:
            link.send(Stop())
        except OSError:
            grace_s = 0
        link.close(grace_s)

    def kill(self) -> None:
        """End the child now."""
        self._running = None
        link, self._link = self._link, None
        if link is not None:
            link.close(0)
