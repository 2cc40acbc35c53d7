"""Submits, and waits for conditions with a deadline."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from latentmill import Client
from tests.compose.conftest import FINISH_TIMEOUT_S, TINY

# Each reading starts a process in a container.
POLL_S = 0.2
T = TypeVar("T")


def until(read: Callable[[], T], holds: Callable[[T], bool], within_s: float = 60.0) -> T:
    """Read until the condition holds; the last reading. Fails with it when time is up."""
    deadline = time.monotonic() + within_s
    while not holds(value := read()):
        assert time.monotonic() < deadline, f"still {value!r} after {within_s} s"
        time.sleep(POLL_S)
    return value


def submit(client: Client, count: int, prompt: str) -> list[str]:
    """Submit jobs one after the other; their ids. Each has to be accepted."""
    return [client.submit(prompt, model=TINY, seed=seed).id for seed in range(count)]


def all_succeed(client: Client, job_ids: Sequence[str], within_s: float = FINISH_TIMEOUT_S) -> None:
    """Follow the jobs until all have ended. Fails unless each succeeded."""
    ended = dict.fromkeys(job_ids, "unknown")
    for event in client.events(*job_ids, timeout_s=within_s):
        ended.update({job.id: job.status for job in event.jobs})
    assert Counter(ended.values()) == {"succeeded": len(job_ids)}
