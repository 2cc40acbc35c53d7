"""What the job store of a stack says, past the api."""

from typing import Any

from sqlalchemy import Row, create_engine, text

from common.domain.ids import parse_job_id
from infra.local.stack import LocalStack


def read(stack: LocalStack, statement: str, **values: object) -> list[Row[Any]]:
    url = stack.environment["LATENTMILL_DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://", 1)
    engine = create_engine(url)
    with engine.connect() as connection:
        rows = list(connection.execute(text(statement), values).all())
    engine.dispose()
    return rows


def attempts_of(stack: LocalStack, job_id: str) -> list[Row[Any]]:
    statement = "SELECT * FROM attempts WHERE job_id = :id ORDER BY attempt"
    return read(stack, statement, id=parse_job_id(job_id))
