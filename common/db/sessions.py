"""Connections to Postgres. Each statement is one transaction: every effect on a job is a single compare-and-set."""

from typing import Any

from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from common.settings import DatabaseSettings

# A statement of ours takes milliseconds; one that hangs must not hold a request or a lease renewal for ever.
_STATEMENT_TIMEOUT_MS = 10_000
_CONNECT_TIMEOUT_S = 5
# A silent peer is noticed within 25 s, inside a lease of 45 s: by keepalives while nothing is under way, and by the
# user timeout while a statement is, for Linux sends no keepalives as long as something is unacknowledged.
_SILENT_PEER = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}


def sync_engine(settings: DatabaseSettings, pool_size: int) -> Engine:
    """Connections for threads (the worker)."""
    return create_engine(_url(settings), **_options(pool_size))


def async_engine(settings: DatabaseSettings, pool_size: int) -> AsyncEngine:
    """Connections for an event loop (api, dispatcher)."""
    return create_async_engine(_url(settings), **_options(pool_size))


def migration_engine(settings: DatabaseSettings) -> Engine:
    """A connection with real transactions and without a statement timeout."""
    return create_engine(_url(settings), hide_parameters=True)


def _url(settings: DatabaseSettings) -> str:
    return settings.database_url.get_secret_value().replace("postgresql://", "postgresql+psycopg://", 1)


def _options(pool_size: int) -> dict[str, Any]:
    return {
        # One round trip a statement instead of BEGIN, statement, COMMIT.
        "isolation_level": "AUTOCOMMIT",
        # An error's text would hold the prompts of a whole flush, and errors get logged.
        "hide_parameters": True,
        "pool_size": pool_size,
        "max_overflow": 0,
        "pool_timeout": 5,
        "pool_pre_ping": True,
        "connect_args": {
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "options": f"-c statement_timeout={_STATEMENT_TIMEOUT_MS}",
            **_SILENT_PEER,
        },
    }
