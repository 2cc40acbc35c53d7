import socket
from pathlib import Path

import pytest

from infra.local.ports import HIGHEST, LOWEST, SHADOW, PortBook, choose, is_free


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free(server.getsockname()[1])


def test_a_chosen_port_and_its_shadow_lie_below_the_ephemeral_range() -> None:
    port = choose(())

    assert LOWEST <= port < HIGHEST
    assert port + SHADOW < 32_768


def test_a_port_whose_shadow_is_taken_is_passed_over() -> None:
    shadows_tried: list[int] = []

    def free(port: int) -> bool:
        if port < HIGHEST:
            return True
        shadows_tried.append(port)
        return len(shadows_tried) > 1

    assert choose((), free) + SHADOW == shadows_tried[1]


def test_no_free_port_is_an_error() -> None:
    with pytest.raises(OSError, match="no free port"):
        choose((), lambda _port: False)


def test_a_port_is_remembered_across_lives(tmp_path: Path) -> None:
    first = PortBook(tmp_path / "ports.json")["api-1"]

    assert PortBook(tmp_path / "ports.json")["api-1"] == first


def test_names_have_ports_of_their_own(tmp_path: Path) -> None:
    book = PortBook(tmp_path / "ports.json")

    assert len({book[f"worker-{number}.metrics"] for number in range(20)}) == 20


def test_a_port_taken_by_a_stranger_is_chosen_anew(tmp_path: Path) -> None:
    book = PortBook(tmp_path / "ports.json")
    remembered = book["redis"]

    with socket.create_server(("127.0.0.1", remembered)):
        book.forget_taken(["redis"])

        assert book["redis"] != remembered


def test_a_port_that_is_still_free_is_kept(tmp_path: Path) -> None:
    book = PortBook(tmp_path / "ports.json")
    remembered = book["redis"]

    book.forget_taken(["redis"])

    assert book["redis"] == remembered


def test_a_preferred_port_is_taken_when_it_is_free(tmp_path: Path) -> None:
    wish = choose(())

    assert PortBook(tmp_path / "ports.json", {"nginx": wish})["nginx"] == wish
