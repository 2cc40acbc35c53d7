import json
from pathlib import Path

import pytest

from infra.local.credentials import load_or_make
from infra.local.plan import caller_environment


@pytest.fixture
def no_exceptions(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_stacks_own_addresses_are_reached_without_a_proxy(no_exceptions: pytest.MonkeyPatch) -> None:
    environment = caller_environment()

    assert environment["no_proxy"] == environment["NO_PROXY"] == "127.0.0.1,localhost"


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_the_callers_own_exceptions_stay(name: str, no_exceptions: pytest.MonkeyPatch) -> None:
    no_exceptions.setenv(name, "intranet")

    environment = caller_environment()

    assert environment["no_proxy"] == environment["NO_PROXY"] == "intranet,127.0.0.1,localhost"


def test_an_exception_for_everything_stays_one(no_exceptions: pytest.MonkeyPatch) -> None:
    no_exceptions.setenv("NO_PROXY", "*")

    assert caller_environment()["no_proxy"] == "*"


def test_a_credential_that_is_missing_is_added_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps({"postgres": "known"}))

    first = load_or_make(path)

    assert first.postgres == "known"
    assert load_or_make(path) == first
    assert len({first.s3_volume_write, first.s3_volume_read, first.s3_filer_write, first.s3_filer_read}) == 4
