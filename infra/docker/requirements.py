"""Print what pip has to install for some extras of pyproject.toml, without the package itself.

    python requirements.py [EXTRA...]

An image installs these before any source is there, so that its largest layer changes with the dependencies alone.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def requirements(extras: list[str]) -> Iterator[str]:
    """Yield the dependencies and those of the extras, and of extras that these name. Raises KeyError for no extra."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield from project["dependencies"]
    for extra in extras:
        yield from _of_extra(project, extra)


def _of_extra(project: dict[str, Any], extra: str) -> Iterator[str]:
    own = re.compile(rf"{project['name']}\[(?P<extras>[^]]+)\]")
    for requirement in project["optional-dependencies"][extra]:
        itself = own.fullmatch(requirement)
        if itself is None:
            yield requirement
            continue
        for other in itself["extras"].split(","):
            yield from _of_extra(project, other.strip())


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in requirements(sys.argv[1:])))
