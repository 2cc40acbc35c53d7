"""Start-up errors of the settings: they name what is wrong, and never show a secret."""

import pytest
from pydantic import SecretStr, ValidationError

from common.db.sessions import async_engine, migration_engine, sync_engine
from common.settings import ApiSettings, DatabaseSettings, read
from tests.unit.test_api_app import SETTINGS

SECRET = "hunter2"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(f"LATENTMILL_{name.upper()}", str(value))
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_URL", f"mysql://a:{SECRET}@127.0.0.1/c"),
        ("DATABASE_URL", f"postgresql://a:{SECRET}/x@127.0.0.1/c"),
        ("DATABASE_URL", f"postgresql://a:x@127.0.0.1:{SECRET}/c"),
        ("DATABASE_URL", f"a:{SECRET}@127.0.0.1"),
        ("AMQP_URL", f"amqp://a:{SECRET}/x@127.0.0.1"),
        ("REDIS_URL", f"http://:{SECRET}@127.0.0.1"),
        ("API_PORT", SECRET),
        ("URL_MODE", SECRET),
    ],
)
def test_a_wrong_value_is_named_and_not_shown(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    environment.setenv(f"LATENTMILL_{name}", value)
    with pytest.raises(SystemExit) as ended:
        read(ApiSettings)
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert told.err.startswith(f"LATENTMILL_{name}: ")
    assert SECRET not in told.err


def test_what_is_missing_is_named_a_line_each(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.delenv("LATENTMILL_DATABASE_URL")
    environment.delenv("LATENTMILL_S3_SECRET_KEY")
    with pytest.raises(SystemExit):
        read(ApiSettings)
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "LATENTMILL_DATABASE_URL: is required",
        "LATENTMILL_S3_SECRET_KEY: is required",
    ]


@pytest.mark.parametrize("url", [f"mysql://a:{SECRET}@b/c", f"postgresql:{SECRET}"])
def test_the_error_itself_holds_no_secret(url: str) -> None:
    with pytest.raises(ValidationError) as refused:
        DatabaseSettings(database_url=SecretStr(url))
    assert SECRET not in str(refused.value)


def test_settings_do_not_print_the_database_password() -> None:
    settings = DatabaseSettings(database_url=SecretStr(f"postgresql://a:{SECRET}@b/c"))
    assert SECRET not in f"{settings} {settings!r} {settings.model_dump_json()}"


async def test_no_error_of_any_engine_shows_the_values_of_a_statement() -> None:
    settings = DatabaseSettings(database_url=SecretStr("postgresql://a:b@127.0.0.1:9/c"))
    engines = (sync_engine(settings, 1), async_engine(settings, 1).sync_engine, migration_engine(settings))
    assert all(engine.hide_parameters for engine in engines)
    assert all(engine.url.password == "b" for engine in engines)
