"""The documentation says what the code does: generated blocks are current, and every link leads somewhere."""

import re
from pathlib import Path

import pytest

from common.db import statements
from common.domain.jobs import TERMINAL_STATES, TRANSITIONS
from docs.blocks import CODES_OF_STATEMENTS
from docs.generate import BLOCKS, ROOT, filled, pages

LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
PAGES = [*pages(), ROOT / "client" / "README.md", ROOT / "models" / "README.md"]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_generated_blocks_are_current(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text == filled(text), "run `make docs`"


def test_every_generated_block_has_its_place() -> None:
    placed = {
        name for page in pages() for name in re.findall(r"<!-- generated: ([a-z-]+) -->", page.read_text("utf-8"))
    }
    assert placed == set(BLOCKS)


def test_the_readme_shows_the_state_graph_of_the_table() -> None:
    drawn = set(re.findall(r"^ +(\S+) --> (\S+)$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE))
    table = {(before.value, after.value) for before, afters in TRANSITIONS.items() for after in afters}
    assert drawn == table | {("[*]", "queued")} | {(state.value, "[*]") for state in TERMINAL_STATES}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_relative_link_leads_to_a_file_and_its_heading(page: Path) -> None:
    broken = [target for target in links(page) if not leads_somewhere(page, target)]
    assert not broken


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, found = set[Path](), {ROOT / "README.md"}
    while new := found - reached:
        reached |= new
        targets = [(page.parent / target.partition("#")[0]).resolve() for page in new for target in links(page)]
        found |= {target for target in targets if target.suffix == ".md" and target.exists()}
    assert set(pages()) <= reached


def test_the_documented_codes_are_those_that_the_statements_write() -> None:
    sql = "\n".join(str(value) for name, value in vars(statements).items() if name.isupper())
    assigned = re.findall(r"error_code = (.+)", sql)
    written = {code for value in assigned for code in re.findall(r"(?:^|THEN |ELSE )'(\w+)'", value)}
    assert written == set(CODES_OF_STATEMENTS)


def links(page: Path) -> list[str]:
    """The relative targets of a page's links, outside code blocks."""
    targets = [found["target"] for found in LINK.finditer(FENCE.sub("", page.read_text("utf-8")))]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def leads_somewhere(page: Path, target: str) -> bool:
    path, _, heading = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    return file.exists() and (not heading or heading in headings(file))


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
