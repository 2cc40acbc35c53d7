"""Bring the schema to the newest version: `python -m migrations upgrade`."""

from pathlib import Path

import click
from alembic import command
from alembic.config import Config

FOLDER = Path(__file__).parent


def alembic_config() -> Config:
    """Alembic's configuration, found beside this file and not in the current folder."""
    config = Config(FOLDER / "alembic.ini")
    config.set_main_option("script_location", str(FOLDER))
    return config


@click.group(help="Change the schema of the job store at LATENTMILL_DATABASE_URL.")
def main() -> None:
    """Entry point."""


@main.command(help="Apply every change up to REVISION.")
@click.argument("revision", default="head")
def upgrade(revision: str) -> None:
    """Apply changes."""
    command.upgrade(alembic_config(), revision)


@main.command(help="Undo changes down to REVISION.")
@click.argument("revision")
def downgrade(revision: str) -> None:
    """Undo changes."""
    command.downgrade(alembic_config(), revision)


if __name__ == "__main__":
    main()
