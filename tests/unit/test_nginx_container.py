"""What the container's script makes of its variables, and whether nginx takes it."""

import shutil
from pathlib import Path

import pytest

from infra.local.nginx import server_lines
from tests.unit.nginx_support import SECRET, certificate, check, programs, render, rendered

BEFORE_RESOLVE = "1.26.3"


@pytest.mark.parametrize("version", [None, BEFORE_RESOLVE], ids=["with resolve", "without resolve"])
def test_nginx_takes_what_the_script_renders(tmp_path: Path, version: str | None) -> None:
    assert render(tmp_path, version).returncode == 0

    done = check(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr


def test_nginx_takes_every_option_at_once(tmp_path: Path) -> None:
    certificate(tmp_path / "tls")
    done = render(tmp_path, TLS_PORT="8443", TLS_DIR=str(tmp_path / "tls"), TRUSTED_PROXIES="10.0.0.0/8, fd00::/8")
    assert done.returncode == 0, done.stderr

    assert check(tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("version", "resolves"),
    [
        ("1.22.1", False),
        ("1.26.3", False),
        ("1.27.2", False),
        ("1.27.3", True),
        ("1.29.0", True),
        ("2.0.0", True),
        ("?", False),
    ],
)
def test_names_are_asked_for_again_where_nginx_can(tmp_path: Path, version: str, resolves: bool) -> None:  # noqa: FBT001
    assert render(tmp_path, version, API_SERVERS="api:8000").returncode == 0

    upstreams = rendered(tmp_path, "upstreams.conf")
    assert ("server api:8000 max_fails=2 fail_timeout=10s resolve;" in upstreams) is resolves
    assert ("resolver 127.0.0.1:53 valid=5s ipv6=off;" in upstreams) is resolves


def test_a_name_that_is_not_known_yet_does_not_keep_nginx_from_starting(tmp_path: Path) -> None:
    render(tmp_path, API_SERVERS="not-started-yet.invalid:8000")

    assert check(tmp_path).returncode == 0


def test_the_local_stack_and_the_container_write_the_same_lines(tmp_path: Path) -> None:
    servers = "api:8000 weight=3, spare-api:8000 backup"
    render(tmp_path, BEFORE_RESOLVE, API_SERVERS=servers)

    assert server_lines(servers, "max_fails=2 fail_timeout=10s") in rendered(tmp_path, "upstreams.conf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("API_SERVERS", ""),
        ("API_SERVERS", "api"),
        ("API_SERVERS", "api:8000 weight=many"),
        ("API_SERVERS", "api:8000,,api:8001"),
        ("API_SERVERS", "api:8000; return 200"),
        ("S3_SERVER", ""),
        ("S3_SERVER", "a:1, b:2"),
        ("S3_BUCKET", "Videos;"),
        ("LISTEN", "8080\n8081"),
        ("SUBMIT_RATE", "fast"),
        ("SUBMIT_BURST", "0"),
        ("CONNECTIONS_PER_ADDRESS", "1;"),
        ("WORKER_PROCESSES", "-1"),
        ("CACHE_SIZE", "2 GB"),
        ("TRUSTED_PROXIES", "everybody"),
        ("TLS_PORT", "https"),
    ],
)
def test_a_bad_value_is_refused_by_name(tmp_path: Path, name: str, value: str) -> None:
    done = render(tmp_path, **{name: value})

    assert done.returncode != 0
    assert name in done.stderr
    assert "must be" in done.stderr


def test_a_secret_that_is_missing_is_told(tmp_path: Path) -> None:
    done = render(tmp_path, EDGE_SECRET_FILE="/nowhere/edge_secret")

    assert done.returncode != 0
    assert "/nowhere/edge_secret is not there" in done.stderr


@pytest.mark.parametrize(
    "secret", ["", "short", 'quote"quote"quote"', "$arg_e-0123456789abc", "one-of-two-lines\nthe-other-line-x"]
)
def test_a_secret_that_nginx_could_misread_is_refused_and_not_shown(tmp_path: Path, secret: str) -> None:
    path = tmp_path / "bad"
    path.write_text(secret, encoding="utf-8")

    done = render(tmp_path, EDGE_SECRET_FILE=str(path))

    assert done.returncode != 0
    assert f"{path} must hold one line" in done.stderr
    assert not secret or secret not in done.stderr + done.stdout


def test_a_cache_that_is_not_there_is_told(tmp_path: Path) -> None:
    done = render(tmp_path, CACHE_DIR="/nowhere")

    assert done.returncode != 0
    assert "/nowhere is not writable" in done.stderr


def test_a_template_that_needs_more_than_the_script_knows_is_refused(tmp_path: Path) -> None:
    templates = tmp_path / "templates"
    templates.mkdir()
    (templates / "nginx.conf.template").write_text("pid ${UNKNOWN};\n", encoding="utf-8")

    done = render(tmp_path, TEMPLATES=str(templates))

    assert done.returncode != 0
    assert "nginx.conf.template needs UNKNOWN" in done.stderr


def test_https_without_a_certificate_is_refused(tmp_path: Path) -> None:
    done = render(tmp_path, TLS_PORT="8443", TLS_DIR=str(tmp_path))

    assert done.returncode != 0
    assert f"{tmp_path}/certificate.pem is not there" in done.stderr


def test_the_secret_is_no_argument_of_any_program(tmp_path: Path) -> None:
    programs(tmp_path)
    for name in ("awk", "cat", "grep", "id", "paste", "sed", "tr"):
        program = tmp_path / "bin" / name
        program.write_text(
            f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/called\nexec {shutil.which(name)} "$@"\n', encoding="utf-8"
        )
        program.chmod(0o700)

    assert render(tmp_path).returncode == 0

    assert "grep -Eqx" in (called := (tmp_path / "called").read_text(encoding="utf-8"))
    assert SECRET not in called
    assert SECRET in rendered(tmp_path, "edge.conf")


def test_only_its_owner_reads_what_holds_the_secret(tmp_path: Path) -> None:
    render(tmp_path)

    assert (tmp_path / "config" / "edge.conf").stat().st_mode & 0o077 == 0
