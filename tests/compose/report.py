"""What the run prints at its end: times and sizes, and on the very last line how many tests passed."""

from dataclasses import dataclass, field

WIDTH = 46


@dataclass(slots=True)
class Report:
    """Figures in the order in which they were taken, and the outcomes of the tests by their ids."""

    figures: list[tuple[str, str]] = field(default_factory=list)
    outcomes: dict[str, bool] = field(default_factory=dict)

    def note(self, what: str, value: str) -> None:
        self.figures.append((what, value))

    def count(self, test: str, phase: str, *, passed: bool) -> None:
        """Take in one phase (setup, call, teardown) of a test: it passed when its call did and no phase failed."""
        if not passed:
            self.outcomes[test] = False
        elif phase == "call":
            self.outcomes.setdefault(test, True)

    @property
    def passed(self) -> int:
        return sum(self.outcomes.values())

    @property
    def failed(self) -> int:
        return len(self.outcomes) - self.passed

    def text(self) -> str:
        return "\n".join(f"{what:<{WIDTH}}{value}" for what, value in self.figures)

    def last_line(self) -> str:
        return f"{self.passed} passed, {self.failed} failed"
