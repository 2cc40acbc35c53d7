"""Where requests go when an api refuses, dies or falls silent: shown with nginx itself."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.nginx_support import Api, ask, refusing, running, serving, silent


def test_a_submit_that_is_refused_goes_to_the_next_api(tmp_path: Path) -> None:
    with (
        running(Api("well")) as well,
        refusing() as gone,
        serving(tmp_path, API_SERVERS=f"127.0.0.1:{gone}, 127.0.0.1:{well.port} backup") as port,
    ):
        answer = ask(port, "POST")

    assert (answer.status, answer.body) == (200, "well")


def test_a_submit_that_was_sent_is_never_sent_again(tmp_path: Path) -> None:
    with (
        running(Api("well")) as well,
        running(Api("dying", dies=True)) as dying,
        serving(tmp_path, API_SERVERS=f"127.0.0.1:{dying.port}, 127.0.0.1:{well.port} backup") as port,
    ):
        answer = ask(port, "POST")

    assert (dying.seen, well.seen) == (["POST"], [])
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "unavailable")


def test_a_read_that_was_sent_is_sent_again(tmp_path: Path) -> None:
    with (
        running(Api("well")) as well,
        running(Api("dying", dies=True)) as dying,
        serving(tmp_path, API_SERVERS=f"127.0.0.1:{dying.port}, 127.0.0.1:{well.port} backup") as port,
    ):
        answer = ask(port, "GET")

    assert (dying.seen, answer.body) == (["GET"], "well")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_api_that_vanished_costs_a_request_a_second(tmp_path: Path, method: str) -> None:
    with (
        running(Api("well")) as well,
        silent() as gone,
        serving(tmp_path, API_SERVERS=f"127.0.0.1:{gone}, 127.0.0.1:{well.port} backup") as port,
    ):
        answer = ask(port, method)

    assert (answer.status, answer.body) == (200, "well")
    assert well.seen == [method]
    assert 0.9 < answer.seconds < 4


def test_an_api_that_failed_twice_is_left_alone(tmp_path: Path) -> None:
    with (
        running(Api("well")) as well,
        silent() as gone,
        serving(tmp_path, API_SERVERS=f"127.0.0.1:{gone}, 127.0.0.1:{well.port} backup") as port,
    ):
        waited = [ask(port, "GET").seconds > 0.9 for _ in range(5)]

    assert waited == [True, True, False, False, False]


def test_the_backup_is_reached_when_two_apis_are_gone(tmp_path: Path) -> None:
    with (
        running(Api("backup")) as backup,
        silent() as one,
        silent() as two,
        serving(tmp_path, API_SERVERS=f"127.0.0.1:{one}, 127.0.0.1:{two}, 127.0.0.1:{backup.port} backup") as port,
    ):
        answer = ask(port, "POST")

    assert (answer.status, answer.body) == (200, "backup")


def test_the_backup_is_asked_only_while_the_others_are_away(tmp_path: Path) -> None:
    with running(Api("backup")) as backup, ExitStack() as until_gone:
        first = until_gone.enter_context(running(Api("first")))
        with serving(tmp_path, API_SERVERS=f"127.0.0.1:{first.port}, 127.0.0.1:{backup.port} backup") as port:
            before = [ask(port, "GET").body for _ in range(10)]
            until_gone.close()
            after = ask(port, "GET").body

    assert (before, after) == (["first"] * 10, "backup")
