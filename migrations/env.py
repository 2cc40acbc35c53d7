"""Alembic's environment: one connection, one transaction, and a lock so that two starters do not collide."""

from alembic import context
from sqlalchemy import text

from common.db.sessions import migration_engine
from common.db.tables import metadata
from common.settings import DatabaseSettings, read

_LOCK = 7_041_776  # any number, as long as every migrating process takes the same one


def run() -> None:
    """Run the asked migrations against LATENTMILL_DATABASE_URL."""
    engine = migration_engine(read(DatabaseSettings))
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=metadata)
        with context.begin_transaction():
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
            context.run_migrations()
    engine.dispose()


run()
