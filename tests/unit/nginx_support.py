"""nginx as a container has it: rendered by its own script, on loopback ports, in front of servers that tests make."""

import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from signal import SIGTERM
from threading import Thread

from infra.local import binaries, process
from infra.local.nginx import TEMPLATES

SCRIPT = TEMPLATES / "docker-entrypoint.sh"
SECRET = "a-secret-of-this-test"
GRACE_S = 10


def free_port() -> int:
    """Return a port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def programs(root: Path, version: str | None = None) -> str:
    """Return a PATH on which nginx is the stack's own; with a version, one that says to be of it."""
    folder = root / "bin"
    folder.mkdir(exist_ok=True)
    nginx = folder / "nginx"
    nginx.unlink(missing_ok=True)
    if version is None:
        nginx.symlink_to(binaries.nginx())
    else:
        nginx.write_text(f"#!/bin/sh\necho 'nginx version: nginx/{version} (Debian)' >&2\n", encoding="utf-8")
        nginx.chmod(0o700)
    return f"{folder}:{os.environ['PATH']}"


def environment(root: Path, version: str | None = None, **changes: str) -> dict[str, str]:
    """Return what the script is given: a container's variables, with the folders of a test."""
    for name in ("config", "cache"):
        (root / name).mkdir(exist_ok=True)
    secret = root / "edge_secret"
    secret.write_text(f"{SECRET}\n", encoding="utf-8")
    given = {
        "PATH": programs(root, version),
        "TEMPLATES": str(TEMPLATES),
        "CONFIG_DIR": str(root / "config"),
        "RUN_DIR": str(root / "config"),
        "CACHE_DIR": str(root / "cache"),
        "EDGE_SECRET_FILE": str(secret),
        "ACCESS_LOG": str(root / "access.log"),
        "API_SERVERS": "127.0.0.1:8001 weight=3, 127.0.0.1:8002 backup",
        "S3_SERVER": "127.0.0.1:8333",
        "RESOLVER": "127.0.0.1:53",
    } | changes
    return {name: value for name, value in given.items() if value}


def render(root: Path, version: str | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the script. A change to nothing takes a variable away."""
    given = environment(root, version, **changes)
    return subprocess.run([SCRIPT], env=given, capture_output=True, text=True, check=False)


def rendered(root: Path, name: str) -> str:
    return (root / "config" / name).read_text(encoding="utf-8")


def command(root: Path) -> list[str]:
    # As root, nginx would give its processes to somebody who cannot enter the folder of a test.
    directives = "daemon off;" + (" user root;" if os.getuid() == 0 else "")
    return [str(binaries.nginx()), "-e", "stderr", "-c", str(root / "config" / "nginx.conf"), "-g", directives]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    """Let the stack's nginx judge what was rendered."""
    return subprocess.run([*command(root), "-t"], capture_output=True, text=True, check=False)


@contextmanager
def serving(root: Path, **changes: str) -> Iterator[int]:
    """Run nginx with a configuration of the script and return its port."""
    port = free_port()
    done = render(root, LISTEN=f"127.0.0.1:{port}", **changes)
    assert done.returncode == 0, done.stderr
    log = root / "nginx.log"
    with log.open("wb") as output, subprocess.Popen(command(root), stdout=output, stderr=output) as nginx:
        try:
            while not _answers(port):
                assert nginx.poll() is None, process.tail(log, 20)
            yield port
        finally:
            nginx.send_signal(SIGTERM)
            nginx.wait(GRACE_S)


def _answers(port: int) -> bool:
    with suppress(OSError):
        return ask(port, "GET", "/-/nginx").status == 204
    return False


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: str
    seconds: float


def ask(port: int, method: str, path: str = "/v1/jobs", tls: ssl.SSLContext | None = None, **headers: str) -> Answer:
    """Send one request over a connection of its own; underscores of a header's name stand for hyphens."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    started = time.monotonic()
    with ExitStack() as open_until:
        open_until.callback(connection.close)
        if tls is not None:
            connection.connect()
            connection.sock = tls.wrap_socket(connection.sock, server_hostname="localhost")
        body = b'{"prompt": "a boat"}' if method == "POST" else None
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response: HTTPResponse = connection.getresponse()
        return Answer(response.status, response.read().decode(), time.monotonic() - started)


@dataclass(slots=True)
class Api:
    """A server that tells its name and keeps what it was asked; `dies` makes it hang up instead of answering."""

    name: str
    dies: bool = False
    seen: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    port: int = 0

    def note(self, request: BaseHTTPRequestHandler) -> None:
        self.seen.append(request.command)
        self.addresses.append(request.headers["X-Real-IP"])


class Listener(ThreadingHTTPServer):
    """A server whose queue holds a burst, as an api's does."""

    request_queue_size = 1024


@contextmanager
def running(api: Api, host: str = "127.0.0.1", port: int = 0) -> Iterator[Api]:
    """Serve until the block is left; then its address refuses."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            api.note(self)
            if api.dies:
                self.close_connection = True
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(api.name)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(api.name.encode())

        do_POST = do_GET  # noqa: N815 - the name that http.server looks for

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with Listener((host, port), Handler) as server:
        api.port = server.server_port
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def refusing() -> Iterator[int]:
    """Return a port that refuses, and that nobody else can take."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextmanager
def silent() -> Iterator[int]:
    """Return a port that neither accepts nor refuses, as the address of a container that was cut off.

    Its queue is filled: the kernel then drops every further request for a connection.
    """
    with socket.socket() as listener, ExitStack() as held:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        while True:
            waiting = held.enter_context(socket.socket())
            waiting.settimeout(0.3)
            try:
                waiting.connect(listener.getsockname())
            except TimeoutError:
                break
        yield listener.getsockname()[1]


def certificate(folder: Path) -> None:
    """Make a certificate of localhost that signed itself, and its key, as tls.conf looks for them."""
    openssl = shutil.which("openssl")
    assert openssl is not None
    folder.mkdir()
    key, made = folder / "key.pem", folder / "certificate.pem"
    request = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([openssl, *request, *names, "-keyout", key, "-out", made], check=True, capture_output=True)
