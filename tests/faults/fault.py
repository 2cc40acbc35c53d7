"""What a fault of the matrix is, and the list of all."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.farm import Farm

# Returns figures for the report, in words; fails by AssertionError.
Inject = Callable[[Farm], str | None]


class SkippedError(Exception):
    """This machine cannot inject the fault; the message says what is missing."""


class NotMetError(AssertionError):
    """What the fault should lead to did not come about."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A row of the fault matrix. `invariants` are those that the oracle checks afterwards, beside what `inject` does.

    short: part of `make test`. within_s: how long after the fault every accepted job must have ended.
    """

    number: str
    injected: str
    invariants: tuple[str, ...]
    inject: Inject
    short: bool
    within_s: float

    @property
    def row(self) -> str:
        """The row of the matrix: F41c is of F41."""
        return self.number[:3]

    @property
    def area(self) -> str:
        """The module it lies in."""
        return self.inject.__module__.rsplit(".", 1)[-1]


FAULTS: list[Fault] = []


def fault(
    number: str, injected: str, invariants: str = "I1 I2 I3 I4 I6 I7", *, short: bool = False, within_s: float = 60.0
) -> Callable[[Inject], Inject]:
    """Enter a function into the list."""

    def enter(inject: Inject) -> Inject:
        FAULTS.append(Fault(number, injected, tuple(invariants.split()), inject, short, within_s))
        return inject

    return enter


def require(condition: object, what: str) -> None:
    """Raise NotMetError with these words unless the condition holds."""
    if not condition:
        raise NotMetError(what)
