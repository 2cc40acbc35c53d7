"""Fills the generated blocks of README and docs from the code: `python -m docs.generate`, or `make docs`.

A page holds `<!-- generated: NAME -->` and `<!-- end of NAME -->`. What stands between them is written anew, the rest
is left alone. A test fails when a block differs from the code.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from docs import blocks, wire

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"<!-- generated: (?P<name>[a-z-]+) -->\n.*?<!-- end of (?P=name) -->", re.DOTALL)

BLOCKS: Mapping[str, Callable[[], str]] = {
    "state-diagram": blocks.state_diagram,
    "moves": blocks.moves,
    "retries": blocks.retries,
    "timers": blocks.timers,
    "settings": blocks.settings,
    "api-errors": blocks.api_errors,
    "nginx-errors": lambda: blocks.nginx_errors((ROOT / "nginx" / "front.conf.template").read_text("utf-8")),
    "job-errors": blocks.job_errors,
    "metrics": lambda: blocks.metrics(ROOT),
    "models": blocks.models,
    "operations": wire.operations,
    "job-request": wire.job_request,
    "job": wire.job,
    "decisions": lambda: blocks.decisions(ROOT / "docs" / "decisions"),
}


def pages() -> list[Path]:
    """README, CHANGELOG and every page under docs."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """The page with its blocks as the code has them now. Raises KeyError for a name that no block has."""
    return _BLOCK.sub(lambda found: _wrapped(found["name"]), text)


def _wrapped(name: str) -> str:
    return f"<!-- generated: {name} -->\n{BLOCKS[name]()}\n<!-- end of {name} -->"


def main() -> None:
    """Write every page whose blocks have changed, and name it."""
    for page in pages():
        text = page.read_text("utf-8")
        new = filled(text)
        if new != text:
            page.write_text(new, "utf-8")
            sys.stdout.write(f"{page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
