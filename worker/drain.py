"""Leaving on SIGTERM: nothing new is taken, the running batch may end within the grace, then it is released."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

import structlog

from worker.engine.process import EngineProcess

log = structlog.get_logger()


class Drain:
    """`requested` after the first SIGTERM or SIGINT; a second one, or the end of the grace, stops the batch."""

    def __init__(self, grace_s: float) -> None:
        self.requested = threading.Event()
        self._urgent = threading.Event()
        self._grace_s = grace_s

    def install(self, engine: EngineProcess, on_request: Callable[[], None]) -> None:
        """Listen for the signals, in the main thread. `on_request` is called from another one."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        # The engine is told from a thread: a handler may interrupt the very code that holds the engine's locks.
        threading.Thread(target=self._watch, args=(engine, on_request), name="drain", daemon=True).start()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested.is_set():
            self._urgent.set()
        self.requested.set()

    def _watch(self, engine: EngineProcess, on_request: Callable[[], None]) -> None:
        self.requested.wait()
        on_request()
        log.info("draining", grace_s=self._grace_s)
        in_a_hurry = self._urgent.wait(self._grace_s)
        log.info("batch_interrupted", second_signal=in_a_hurry)
        engine.interrupt()
