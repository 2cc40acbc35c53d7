"""Takes a worker that fails job after job out of rotation, so that a bad GPU does not use up their retries."""

import random
import threading
import time
from collections.abc import Callable, Collection

import structlog

# Failures in a row, each with a job that was not among those before: one bad job is no sign of a bad worker.
_LIMIT = 3
_WAIT_FIRST_S = 2.0
_WAIT_CAP_S = 300.0

log = structlog.get_logger()


class Breaker:
    """Opens after three failures in a row, closes when a canary job succeeds. Several threads report to it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failed: set[str] = set()
        self._streak = 0
        self._wait_s = _WAIT_FIRST_S
        self._next_canary_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the worker must take no jobs."""
        return self._next_canary_at is not None

    @property
    def canary_is_due(self) -> bool:
        """Whether it is time to try whether the engine works again."""
        at = self._next_canary_at
        return at is not None and self._clock() >= at

    def failed(self, job_ids: Collection[str]) -> None:
        """These jobs failed together, through no fault of their input."""
        with self._lock:
            if not self._failed.issuperset(job_ids):
                self._failed.update(job_ids)
                self._streak += 1
            if self._streak >= _LIMIT and self._next_canary_at is None:
                log.error("breaker_opened", failures_in_a_row=self._streak, canary_in_s=round(self._wait_s, 1))
                self._wait()

    def succeeded(self) -> None:
        """A job was rendered and encoded: the engine works."""
        with self._lock:
            self._failed.clear()
            self._streak = 0
            self._wait_s = _WAIT_FIRST_S

    def note_canary(self, *, passed: bool) -> None:
        """A canary was run. The wait grows on, also after one that passed, until a real job succeeds."""
        with self._lock:
            if passed:
                log.warning("breaker_closed")
                self._failed.clear()
                self._streak = 0
                self._next_canary_at = None
            else:
                log.error("canary_failed", next_in_s=round(self._wait_s, 1))
                self._wait()

    def _wait(self) -> None:
        jitter = random.uniform(0.8, 1.2)  # noqa: S311  spreads canaries, guards nothing
        self._next_canary_at = self._clock() + self._wait_s * jitter
        self._wait_s = min(2 * self._wait_s, _WAIT_CAP_S)
