"""Leaving on SIGTERM: nothing new is taken, the running batch may end within the grace, then it is released."""

import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import structlog

log = structlog.get_logger()

# An interrupt is lost when it comes between a claim and its run, so it is repeated until the loop has ended.
_REPEAT_S = 0.5


class Drain:
    """`requested` after the first SIGTERM or SIGINT; a second one, or the end of the grace, stops the batch."""

    def __init__(self, grace_s: float) -> None:
        self.requested = threading.Event()
        self.finished = threading.Event()
        self._urgent = threading.Event()
        self._grace_s = grace_s
        self._ends_at = math.inf

    @property
    def left_s(self) -> float:
        """Seconds that the running batch may still take; endless before the first signal."""
        return self._ends_at - time.monotonic()

    def install(self, on_request: Callable[[], None], give_up: Callable[[], None]) -> None:
        """Listen for the signals, in the main thread; both functions are called from another one.

        `on_request` is called at the first signal, `give_up` when the grace is over, again and again until `finished`:
        a handler may interrupt the very code that holds the locks that these functions need.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._watch, args=(on_request, give_up), name="drain", daemon=True).start()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested.is_set():
            self._urgent.set()
        self.requested.set()

    def _watch(self, on_request: Callable[[], None], give_up: Callable[[], None]) -> None:
        self.requested.wait()
        self._ends_at = time.monotonic() + self._grace_s
        log.info("draining", grace_s=self._grace_s)
        on_request()
        in_a_hurry = self._urgent.wait(self._grace_s)
        log.info("grace_over", second_signal=in_a_hurry)
        give_up()
        while not self.finished.wait(_REPEAT_S):
            give_up()
