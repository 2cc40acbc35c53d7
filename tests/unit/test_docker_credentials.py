"""The passwords of a compose stack: random, made once, and each consumer sees its own."""

import json
from pathlib import Path

import pytest

from common.settings import StorageSettings, WorkerSettings, read
from infra.docker.credentials import files, write

CONSUMERS = ("postgres", "rabbitmq", "redis", "seaweedfs", "nginx", "api", "dispatcher", "worker", "setup")


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    for name in ("kept", *CONSUMERS):
        (tmp_path / name).mkdir()
    write(tmp_path, "videos")
    return tmp_path


def contents(volumes: Path) -> dict[str, str]:
    return {str(path.relative_to(volumes)): path.read_text() for path in volumes.rglob("*") if path.is_file()}


def secrets_of(volumes: Path) -> dict[str, str]:
    return json.loads((volumes / "kept" / "credentials.json").read_text())  # type: ignore[no-any-return]


def test_two_stacks_share_no_password(volumes: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    for name in ("kept", *CONSUMERS):
        (other / name).mkdir()
    write(other, "videos")
    assert not set(secrets_of(volumes).values()) & set(secrets_of(other).values())


def test_a_second_start_changes_nothing(volumes: Path) -> None:
    before = contents(volumes)
    write(volumes, "videos")
    assert contents(volumes) == before


def test_a_lost_volume_is_filled_with_the_same_values(volumes: Path) -> None:
    before = contents(volumes)
    for path in (volumes / "api").iterdir():
        path.unlink()
    write(volumes, "videos")
    assert contents(volumes) == before


def test_what_all_know_is_for_its_maker_alone(volumes: Path) -> None:
    assert (volumes / "kept" / "credentials.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("consumer", ["nginx", "postgres", "redis", "rabbitmq", "dispatcher"])
def test_who_serves_no_videos_has_no_key_of_the_bucket(volumes: Path, consumer: str) -> None:
    keys = {value for name, value in secrets_of(volumes).items() if name.startswith("s3_")}
    seen = "".join(path.read_text() for path in (volumes / consumer).iterdir())
    assert not [key for key in keys if key in seen]


def test_a_worker_cannot_sign_addresses(volumes: Path) -> None:
    assert secrets_of(volumes)["edge"] not in "".join(path.read_text() for path in (volumes / "worker").iterdir())


def test_only_the_task_of_the_first_start_may_do_all_in_the_store(volumes: Path) -> None:
    identities = json.loads((volumes / "seaweedfs" / "s3.json").read_text())["identities"]
    assert [one["name"] for one in identities if "Admin" in one["actions"]] == ["setup"]
    assert {action for one in identities if one["name"] == "api" for action in one["actions"]} == {
        "Read:videos",
        "List:videos",
    }


def test_where_a_store_has_one_key_all_use_it(volumes: Path) -> None:
    write(volumes, "videos", one_s3_key=True)
    keys = {(volumes / name / "latentmill_s3_access_key").read_text() for name in ("worker", "api", "setup")}
    assert keys == {(volumes / "seaweedfs" / "access_key").read_text()}


def test_a_worker_finds_all_that_it_needs_in_its_folder(volumes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATENTMILL_SECRETS_DIR", str(volumes / "worker"))
    settings = read(WorkerSettings)
    values = secrets_of(volumes)
    assert settings.database_url.get_secret_value() == (
        f"postgresql://latentmill:{values['postgres']}@postgres:5432/latentmill"
    )
    assert settings.s3_secret_key.get_secret_value() == values["s3_worker_secret"]


def test_the_environment_wins_over_a_file(volumes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATENTMILL_SECRETS_DIR", str(volumes / "api"))
    monkeypatch.setenv("LATENTMILL_S3_ACCESS_KEY", "of another store")
    assert read(StorageSettings).s3_access_key.get_secret_value() == "of another store"


def test_a_folder_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LATENTMILL_SECRETS_DIR", str(tmp_path / "absent"))
    with pytest.raises(SystemExit) as left:
        read(StorageSettings)
    assert left.value.code == 2
    assert "LATENTMILL_SECRETS_DIR: must be a folder" in capsys.readouterr().err


def test_every_consumer_gets_something() -> None:
    known = dict.fromkeys(
        [
            *("postgres", "rabbitmq", "redis", "edge"),
            *(f"s3_{owner}_{part}" for owner in ("setup", "worker", "api") for part in ("key", "secret")),
            *(f"s3_{server}_{verb}" for server in ("volume", "filer") for verb in ("write", "read")),
        ],
        "x",
    )
    assert set(files(known, "videos")) == set(CONSUMERS)
