from pathlib import Path
from threading import Event

import pytest

from infra.local.part import Launch, Part, StackError
from infra.local.startup import bring_up, by_depth, stop_needs


def part(name: str, *needs: str) -> Part:
    return Part(name, lambda: Launch(("true",), Path("/"), {}), lambda: True, needs)


def silent(_name: str, _seconds: float) -> None:
    return


def test_a_part_lies_above_what_it_needs() -> None:
    parts = [part("worker", "migrations", "broker"), part("migrations", "database"), part("broker"), part("database")]

    names = [[found.name for found in level] for level in by_depth(parts)]

    assert names == [["broker", "database"], ["migrations"], ["worker"]]


def test_a_need_outside_the_list_does_not_hold_a_part_back() -> None:
    worker = part("worker", "database")

    assert by_depth([worker]) == [[worker]]


def test_a_part_stops_before_what_it_only_uses() -> None:
    worker = Part("worker", lambda: Launch(("true",), Path("/"), {}), None, uses=("broker",))

    names = [[found.name for found in level] for level in by_depth([worker, part("broker")], stop_needs)]

    assert names == [["broker"], ["worker"]]


def test_a_circle_is_an_error() -> None:
    with pytest.raises(StackError, match="wait for one another"):
        by_depth([part("a", "b"), part("b", "a")])


def test_a_part_begins_after_what_it_needs_is_ready() -> None:
    ready: list[str] = []

    def begin(begun: Part, _abort: Event) -> None:
        assert set(begun.needs) <= set(ready)

    bring_up([part("c", "b"), part("b", "a"), part("a")], begin, lambda name, _seconds: ready.append(name))

    assert ready == ["a", "b", "c"]


def test_parts_without_needs_begin_side_by_side() -> None:
    both = {"a": Event(), "b": Event()}

    def begin(begun: Part, _abort: Event) -> None:
        both[begun.name].set()
        assert all(event.wait(10) for event in both.values())

    bring_up([part("a"), part("b")], begin, silent)


def test_a_failure_is_told_and_the_rest_is_given_up() -> None:
    begun: list[str] = []

    def begin(beginning: Part, abort: Event) -> None:
        begun.append(beginning.name)
        if beginning.name == "broken":
            message = "broken ended with exit status 1"
            raise StackError(message)
        assert abort.wait(10)

    with pytest.raises(StackError, match="broken ended"):
        bring_up([part("slow"), part("broken"), part("after", "broken")], begin, silent)

    assert "after" not in begun
