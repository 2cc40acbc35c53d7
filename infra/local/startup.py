"""Brings parts up side by side: each on a thread, as soon as those that it needs are ready."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from itertools import chain
from threading import Event

from infra.local.part import Part, StackError

Begin = Callable[[Part, Event], None]
OnReady = Callable[[str, float], None]


class AbandonedError(StackError):
    """A part was given up because another one failed."""


def start_needs(part: Part) -> tuple[str, ...]:
    """Return what must be ready before this part is launched."""
    return part.needs


def stop_needs(part: Part) -> tuple[str, ...]:
    """Return what must be there until this part has stopped."""
    return part.needs + part.uses


def by_depth(parts: Sequence[Part], below: Callable[[Part], tuple[str, ...]] = start_needs) -> list[list[Part]]:
    """Return the parts in levels: each lies above those of the list that `below` names for it.

    Raises StackError when parts wait for one another.
    """
    left = list(parts)
    levels: list[list[Part]] = []
    while left:
        waiting = {part.name for part in left}
        level = [part for part in left if not waiting.intersection(below(part))]
        if not level:
            message = f"the parts {sorted(waiting)} wait for one another"
            raise StackError(message)
        levels.append(level)
        left = [part for part in left if part not in level]
    return levels


def bring_up(parts: Sequence[Part], begin: Begin, on_ready: OnReady) -> None:
    """Begin every part once its needs are ready. `begin` returns when the part serves or raises StackError.

    The first failure, or an interrupt of the caller, sets the Event given to `begin`, and the rest is given up.
    """
    abort = Event()
    started = time.monotonic()
    futures: dict[str, Future[None]] = {}

    def run(part: Part) -> None:
        for need in part.needs:
            if need in futures:
                futures[need].result()
        if abort.is_set():
            raise AbandonedError(part.name)
        begin(part, abort)
        on_ready(part.name, time.monotonic() - started)

    with ThreadPoolExecutor(max_workers=max(1, len(parts))) as pool:
        try:
            for part in chain.from_iterable(by_depth(parts)):
                futures[part.name] = pool.submit(run, part)
            wait(futures.values(), return_when=FIRST_EXCEPTION)
        finally:
            abort.set()
    _raise_first(futures)


def _raise_first(futures: dict[str, Future[None]]) -> None:
    errors = [error for future in futures.values() if (error := future.exception()) is not None]
    # Those that were given up, or waited for the one that failed, say nothing about the cause.
    for error in sorted(errors, key=lambda found: isinstance(found, AbandonedError)):
        raise error
