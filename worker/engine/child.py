"""The engine's process: loads one model, renders the batches it is sent, and ends with its parent.

Started by worker.engine.link as `python -m worker.engine.child <pipe fd> <frames fd> <lifeline fd>`, a fresh
interpreter: nothing of the parent (threads, connections, secrets) comes along.
"""

import fcntl
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from common.domain.jobs import ErrorClass
from worker.engine.base import (
    Alive,
    BatchDone,
    Engine,
    EngineBrokenError,
    EngineConfig,
    Event,
    FramesReady,
    MemberCancelled,
    MemberDecoded,
    MemberFailed,
    MemberInterrupted,
)
from worker.engine.frames import FrameWriter, SharedFrames
from worker.engine.wire import Cancel, FramesAt, GiveBack, Interrupt, Load, LoadFailed, Ready, Run, Stop

EXIT_LOAD_FAILED = 3
EXIT_BROKEN = 4
# Far below any stall limit, and few enough messages not to matter beside a step.
_ALIVE_EVERY_S = 0.5


def main() -> int:
    """Serve until told to stop."""
    pipe_fd, frames_fd, lifeline_fd = (int(argument) for argument in sys.argv[1:4])
    _end_with_parent(lifeline_fd)
    connection: Connection[object, object] = Connection(pipe_fd)
    load = connection.recv()
    if not isinstance(load, Load):
        msg = f"the first message must be Load, not {type(load).__name__}"
        raise TypeError(msg)
    writer = FrameWriter(SharedFrames(frames_fd, load.layout))
    os.close(frames_fd)
    commands = Commands(connection, writer)
    engine = _load(load.config, connection)
    if engine is None:
        return EXIT_LOAD_FAILED
    return _serve(engine, commands, Outbox(connection, writer))


def _end_with_parent(lifeline_fd: int) -> None:
    """Have the kernel end this process when the parent is gone, even while a hung call keeps the interpreter lock.

    The parent holds the other end of the lifeline and never writes: its end closes when it dies, by whatever means, and
    the default action of SIGIO is to terminate. (PR_SET_PDEATHSIG would fire when the parent's *thread* ends.)
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):  # a Ctrl-C reaches the whole group; the parent decides
        signal.signal(ignored, signal.SIG_IGN)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)


def _load(config: EngineConfig, connection: "Connection[object, object]") -> Engine | None:
    try:
        engine = build(config)
        engine.load()
        engine.warmup()
    except Exception:  # noqa: BLE001 - the edge of the process: the parent decides, with this text
        connection.send(LoadFailed(traceback.format_exc(limit=-6)))
        return None
    connection.send(Ready(engine.capabilities()))
    return engine


def build(config: EngineConfig) -> Engine:
    """The engine by its name. Imported here, so that a synthetic worker needs no torch.

    Raises ValueError or OSError when the checkpoint is missing, before seconds are spent on imports.
    """
    if config.engine == "synthetic":
        from worker.engine.synthetic import SyntheticEngine  # noqa: PLC0415

        return SyntheticEngine(config)
    if config.model_path is None:
        msg = f"LATENTMILL_MODEL_PATH must name the folder with the checkpoint of {config.model}"
        raise ValueError(msg)
    if not (config.model_path / "model_index.json").is_file():
        msg = f"{config.model_path} is no checkpoint in the diffusers layout: there is no model_index.json"
        raise OSError(msg)
    from worker.engine.wan import WanEngine  # noqa: PLC0415

    return WanEngine(config, config.model_path)


class Commands:
    """Reads the parent's commands in a thread, so that a cancel reaches a running batch."""

    def __init__(self, connection: "Connection[object, object]", writer: FrameWriter) -> None:
        self._connection = connection
        self._writer = writer
        self._runs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.cancelled: frozenset[str] = frozenset()
        self.interrupted_batch: str | None = None
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def next_run(self) -> Run | None:
        """Wait for the next batch; None: stop."""
        return self._runs.get()

    def forget_cancels(self, job_ids: Iterable[str]) -> None:
        """Drop what a batch that has ended leaves; cancels that overtook the next batch stay."""
        with self._lock:
            self.cancelled = self.cancelled.difference(job_ids)

    def _read(self) -> None:
        code = EXIT_BROKEN
        try:
            while True:
                self._take(self._connection.recv())
        except (EOFError, OSError):
            code = 0  # the parent is gone
        except Exception:  # noqa: BLE001 - the edge of the thread, without which this process is deaf
            traceback.print_exc()
        os._exit(code)  # the main thread may be deep inside a kernel

    def _take(self, command: object) -> None:
        match command:
            case Run():
                self._runs.put(command)
            case Cancel(job_ids):
                with self._lock:
                    self.cancelled |= job_ids
            case Interrupt(batch_id):
                self.interrupted_batch = batch_id
            case GiveBack(slot):
                self._writer.give_back(slot)
            case Stop():
                self._runs.put(None)


@dataclass(frozen=True, slots=True)
class BatchControl:
    """Implements Control for one batch."""

    commands: Commands
    batch_id: str
    deadline: float

    def cancelled(self) -> frozenset[str]:
        """Ids of jobs to drop."""
        return self.commands.cancelled

    def interrupted(self) -> bool:
        """Whether this batch must stop now."""
        return self.commands.interrupted_batch == self.batch_id


class Outbox:
    """Sends an engine's events to the parent and keeps count of the members that have no outcome yet."""

    def __init__(self, connection: "Connection[object, object]", writer: FrameWriter) -> None:
        self._connection = connection
        self._writer = writer
        self._alive_at = 0.0
        self.pending: set[str] = set()

    def emit(self, event: Event) -> None:
        """Send one event; waits while all frame slots are with the parent."""
        match event:
            case Alive():
                if time.monotonic() - self._alive_at < _ALIVE_EVERY_S:
                    return
                self._alive_at = time.monotonic()
                self._connection.send(event)
            case FramesReady(job_id, index, frames):
                slot = self._writer.put(frames)
                self._connection.send(FramesAt(job_id, index, slot, frames.shape))
            case MemberDecoded() | MemberFailed() | MemberCancelled() | MemberInterrupted():
                self.pending.discard(event.job_id)
                self._connection.send(event)
            case _:
                self._connection.send(event)


def _serve(engine: Engine, commands: Commands, outbox: Outbox) -> int:
    while (run := commands.next_run()) is not None:
        try:
            healthy = _render(engine, run, commands, outbox)
        except EngineBrokenError:
            traceback.print_exc()
            return EXIT_BROKEN
        commands.forget_cancels(run.batch.job_ids)
        outbox.emit(BatchDone(run.batch.batch_id, healthy))
    engine.close()
    return 0


def _render(engine: Engine, run: Run, commands: Commands, outbox: Outbox) -> bool:
    """Run one batch; whatever an engine lets through fails its members, not the process."""
    outbox.pending = set(run.batch.job_ids)
    control = BatchControl(commands, run.batch.batch_id, run.deadline)
    healthy, raised, failure = True, False, "the engine ended without an outcome for this job"
    try:
        healthy = engine.run(run.batch, outbox.emit, control)
    except EngineBrokenError:
        raise
    except Exception as error:  # noqa: BLE001 - the batch boundary
        traceback.print_exc()
        raised, failure = True, f"{type(error).__name__}: {error}"
    for job_id in tuple(outbox.pending):
        outbox.emit(MemberFailed(job_id, ErrorClass.INTERNAL, failure))
    if raised:
        engine.reset()
    return healthy


if __name__ == "__main__":
    _code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_code)  # tearing torch down takes seconds, and there is nothing left to tidy up
