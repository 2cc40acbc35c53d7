"""What the images are built from, and how their containers tell that they are well."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.docker.healthcheck import answers
from infra.docker.requirements import requirements
from tests.conftest import REPOSITORY

HEALTHCHECK = REPOSITORY / "infra" / "docker" / "healthcheck.py"


@contextmanager
def server(answer: bytes) -> Iterator[int]:
    """A port that answers every request with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer_once, args=(listener, answer))
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def _answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(answer)


@pytest.mark.parametrize(("status", "well"), [("200 OK", True), ("503 Service Unavailable", False)])
def test_a_port_is_well_when_it_answers_200(status: str, well: bool) -> None:  # noqa: FBT001
    with server(f"HTTP/1.1 {status}\r\n\r\n".encode()) as port:
        assert answers(port, "/readyz") is well


def test_a_port_that_says_something_else_is_not_well() -> None:
    with server(b"220 mail\r\n") as port:
        assert not answers(port, "/readyz")


def test_a_closed_port_ends_the_check_with_its_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-I", "-S", str(HEALTHCHECK), str(port), "/readyz"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "refused" in done.stderr


def test_a_server_image_holds_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    names = {line.split(">")[0].split("[")[0] for line in requirements([])}
    assert {"fastapi", "pika"} <= names
    assert not {"torch", "diffusers", "av"} & names


def test_a_synthetic_worker_holds_the_encoder_and_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    names = {line.split(">")[0] for line in requirements(["synthetic"])}
    assert "av" in names
    assert "torch" not in names


def test_an_extra_brings_those_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert set(requirements(["synthetic"])) < set(requirements(["worker"]))


def test_an_unknown_extra_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(KeyError, match="cdua"):
        list(requirements(["cdua"]))


def test_images_need_no_frontend_from_a_registry() -> None:
    text = Path(REPOSITORY / "infra" / "docker" / "Dockerfile").read_text()
    assert "syntax=" not in text
