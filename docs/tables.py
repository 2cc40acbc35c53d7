"""Markdown tables."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = [head, ["---"] * len(head), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(value: object) -> str:
    """The value as code; nothing stays nothing."""
    return f"`{value}`" if str(value) else ""
