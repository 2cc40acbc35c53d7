"""One engine child as its parent holds it: the process, the pipe, the lifeline, the shared frames, its last words."""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import structlog

from common.domain.profiles import PROFILES
from worker.engine.base import EngineConfig, FramesReady
from worker.engine.frames import Layout, SharedFrames, create
from worker.engine.wire import Command, FramesAt, GiveBack, Load

log = structlog.get_logger(__name__)

# A child whose command thread lives empties the pipe in milliseconds: a write that waits longer found it hung.
_SEND_TIMEOUT_S = 10
# A killed process that is still there after this waits inside a driver, and may do so for ever.
_DEATH_TIMEOUT_S = 10
# Enough for the stacks of a crash with a pipeline under it.
_LAST_LINES = 60
_SOURCE_ROOT = Path(__file__).resolve().parents[2]


class Link:
    """A running child. `send` and `give_back` may be called from any thread, the rest from one."""

    def __init__(self, config: EngineConfig) -> None:
        self.layout = Layout.for_area(PROFILES[config.model].max_area)
        self._lock = threading.Lock()
        self._lent: set[int] = set()
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        self._spawn(config)
        self._reader = threading.Thread(target=self._read_output, name="engine-output", daemon=True)
        self._reader.start()
        self.send(Load(config, self.layout))

    def _spawn(self, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        lifeline, self._lifeline = os.pipe()
        frames_fd = create(self.layout)
        child_fds = (theirs.fileno(), frames_fd, lifeline)
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-X", "faulthandler", "-m", "worker.engine.child", *map(str, child_fds)],
                pass_fds=child_fds,
                env=child_environment(config, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self._frames = SharedFrames(frames_fd, self.layout)
        finally:
            theirs.close()
            os.close(lifeline)
            os.close(frames_fd)
        self._connection: Connection[object, object] = Connection(ours.detach())

    def send(self, command: Command) -> None:
        """Send a command. Raises OSError when the child is gone, TimeoutError when it does not read."""
        with self._lock:
            try:
                self._connection.send(command)
            except BlockingIOError as error:
                msg = f"the engine child read nothing for {_SEND_TIMEOUT_S} s"
                raise TimeoutError(msg) from error

    def receive(self, timeout_s: float) -> object | None:
        """The next message, or None after `timeout_s`. Raises EOFError or OSError when the child is gone."""
        return self._connection.recv() if self._connection.poll(timeout_s) else None

    def lend(self, at: FramesAt) -> FramesReady:
        """Frames in the shared memory as an event whose release gives the slot back, once."""
        with self._lock:
            self._lent.add(at.slot)
        return FramesReady(at.job_id, at.index, self._frames.view(at.slot, at.shape), partial(self.give_back, at.slot))

    def give_back(self, slot: int) -> None:
        """Return a slot. Calling it again, or after the child's end, does nothing."""
        with self._lock:
            if slot not in self._lent:
                return
            self._lent.discard(slot)
        try:
            self.send(GiveBack(slot))
        except OSError:
            return  # the child is gone, and the slots with it

    @property
    def lent(self) -> int:
        """How many slots wait for their release."""
        return len(self._lent)

    @property
    def waits_for_us(self) -> bool:
        """Whether the child cannot go on until the parent releases frames."""
        return self.lent >= self.layout.slots

    def last_words(self) -> str:
        """The last lines the child wrote; complete once it has ended."""
        if self.process.poll() is not None:
            self._reader.join(timeout=1)
        return "\n".join(self._said)

    def close(self, grace_s: float) -> int:
        """Wait for the child's end at most `grace_s`, then kill it. Returns its exit code."""
        try:
            exit_code = self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            exit_code = self._await_killed()
        with self._lock:
            if not self._connection.closed:
                self._connection.close()
                os.close(self._lifeline)
        return exit_code

    def _await_killed(self) -> int:
        """A process that waits inside a driver cannot be killed. Its jobs must not wait for it."""
        try:
            return self.process.wait(_DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.error("engine_child_does_not_die", pid=self.process.pid)  # noqa: TRY400  the trace says nothing more
            return -signal.SIGKILL

    def _read_output(self) -> None:
        output = self.process.stdout
        if output is None:
            return
        with output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                self._said.append(line)
                log.info("engine_child_said", line=line)


def child_environment(config: EngineConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: no setting or secret of the service, no network for the model libraries."""
    kept = {name: value for name, value in inherited.items() if not name.startswith("LATENTMILL_")}
    search = [str(_SOURCE_ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    kept |= {
        "PYTHONPATH": os.pathsep.join(search),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",  # its notes about missing optional packages are not about us
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # The decode's large, uneven blocks fragment the allocator's fixed segments (out of memory with memory left).
    kept.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Threads that spin at OpenMP barriers made a clip ten times slower when two processes shared two cores.
    kept.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if config.threads:
        kept |= {"OMP_NUM_THREADS": str(config.threads), "MKL_NUM_THREADS": str(config.threads)}
    return kept
