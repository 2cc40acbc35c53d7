"""One statement and its rows, for callers who may lose patience."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, TextClause
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine


async def fetch(engine: AsyncEngine, statement: TextClause, values: Mapping[str, Any]) -> Sequence[Row[Any]]:
    """Execute the statement and return its rows. Raises SQLAlchemy's errors.

    It runs in a task of its own: psycopg ends a cancelled statement together with the server, and a server that is
    frozen never answers that. So the caller goes, and the connection is left to whatever becomes of it.
    """
    return await asyncio.shield(asyncio.create_task(_fetch(engine, statement, values)))


async def _fetch(engine: AsyncEngine, statement: TextClause, values: Mapping[str, Any]) -> Sequence[Row[Any]]:
    async with engine.connect() as connection:
        return (await connection.execute(statement, dict(values))).all()


def loggable(error: SQLAlchemyError) -> dict[str, str | None]:
    """What may be logged of a database's error. Its text may not: Postgres quotes the row that it refused."""
    return {"error": type(error).__name__, "sqlstate": getattr(getattr(error, "orig", None), "sqlstate", None)}
