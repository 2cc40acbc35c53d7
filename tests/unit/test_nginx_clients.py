"""How nginx meets its clients: their addresses, their number, HTTPS; and names that change behind it."""

import shutil
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import pytest

from tests.unit.nginx_support import Api, ask, certificate, free_port, running, serving

CLIENT = "203.0.113.7"


@pytest.fixture
def api() -> Iterator[Api]:
    with running(Api("api")) as api:
        yield api


def test_what_a_client_says_about_its_address_is_not_believed(tmp_path: Path, api: Api) -> None:
    with serving(tmp_path, API_SERVERS=f"127.0.0.1:{api.port}") as port:
        ask(port, "GET", X_Forwarded_For=CLIENT)

    assert api.addresses == ["127.0.0.1"]


def test_a_trusted_load_balancer_tells_the_address_of_its_client(tmp_path: Path, api: Api) -> None:
    with serving(tmp_path, API_SERVERS=f"127.0.0.1:{api.port}", TRUSTED_PROXIES="127.0.0.0/8") as port:
        ask(port, "GET", X_Forwarded_For=CLIENT)

    assert api.addresses == [CLIENT]


def test_an_untrusted_load_balancer_tells_nothing(tmp_path: Path, api: Api) -> None:
    with serving(tmp_path, API_SERVERS=f"127.0.0.1:{api.port}", TRUSTED_PROXIES="10.0.0.0/8") as port:
        ask(port, "GET", X_Forwarded_For=CLIENT)

    assert api.addresses == ["127.0.0.1"]


def test_a_burst_of_submits_from_one_address_passes_by_default(tmp_path: Path, api: Api) -> None:
    with (
        serving(tmp_path, API_SERVERS=f"127.0.0.1:{api.port}") as port,
        ThreadPoolExecutor(8) as clients,
    ):
        statuses = set(clients.map(lambda _: ask(port, "POST").status, range(1000)))

    assert statuses == {200}


def test_a_rate_that_is_set_is_kept(tmp_path: Path, api: Api) -> None:
    with serving(tmp_path, API_SERVERS=f"127.0.0.1:{api.port}", SUBMIT_RATE="1r/m", SUBMIT_BURST="1") as port:
        statuses = [ask(port, "POST").status for _ in range(3)]

    assert statuses == [200, 200, 429]


@pytest.fixture
def trusting(tmp_path: Path) -> ssl.SSLContext:
    """What a client needs to believe the certificate that tmp_path/tls then holds."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate")
    certificate(tmp_path / "tls")
    return ssl.create_default_context(cafile=str(tmp_path / "tls" / "certificate.pem"))


@pytest.fixture
def https(tmp_path: Path, api: Api, trusting: ssl.SSLContext) -> Iterator[int]:
    port = free_port()
    tls = {"TLS_PORT": str(port), "TLS_DIR": str(tmp_path / "tls")}
    with serving(tmp_path, API_SERVERS=f"127.0.0.1:{api.port}", **tls):
        yield port


@contextmanager
def encrypted(port: int, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        yield connection


def test_https_reaches_the_api(https: int, trusting: ssl.SSLContext) -> None:
    assert ask(https, "POST", tls=trusting).body == "api"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_current_versions_of_tls_are_spoken(https: int, trusting: ssl.SSLContext, version: ssl.TLSVersion) -> None:
    trusting.minimum_version = trusting.maximum_version = version

    with encrypted(https, trusting) as connection:
        assert connection.version() == version.name.replace("_", ".")


def test_https_speaks_http_2_with_those_who_offer_it(https: int, trusting: ssl.SSLContext) -> None:
    trusting.set_alpn_protocols(["h2", "http/1.1"])

    with encrypted(https, trusting) as connection:
        assert connection.selected_alpn_protocol() == "h2"


@dataclass(slots=True)
class Name:
    """A name server that knows every name, and its one address."""

    address: str
    port: int = 0

    def answer(self, question: bytes) -> bytes:
        # The question is repeated; the record names it by its place and holds an IPv4 address for a second.
        head = question[:2] + struct.pack("!HHHHH", 0x8180, 1, 1, 0, 0)
        record = struct.pack("!HHHIH", 0xC00C, 1, 1, 1, 4) + socket.inet_aton(self.address)
        return head + question[12 : question.index(b"\0", 12) + 5] + record


@contextmanager
def answering(name: Name) -> Iterator[Name]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        name.port = server.getsockname()[1]
        thread = Thread(target=_answer_until_told, args=(server, name))
        thread.start()
        try:
            yield name
        finally:
            server.sendto(b"", server.getsockname())
            thread.join()


def _answer_until_told(server: socket.socket, name: Name) -> None:
    while True:
        question, asker = server.recvfrom(512)
        if not question:
            return
        server.sendto(name.answer(question), asker)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback is one address")
def test_a_replica_that_came_later_is_found_without_a_restart(tmp_path: Path) -> None:
    with (
        running(Api("old"), "127.0.0.2") as old,
        running(Api("new"), "127.0.0.3", old.port),
        answering(Name("127.0.0.2")) as name,
        serving(tmp_path, API_SERVERS=f"api.invalid:{old.port}", RESOLVER=f"127.0.0.1:{name.port}") as port,
    ):
        until(lambda: ask(port, "GET").body == "old")
        name.address = "127.0.0.3"
        until(lambda: ask(port, "GET").body == "new")


def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition; nginx asks for names every 5 s."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
