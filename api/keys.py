"""Make, list and revoke API keys: `python -m api.keys create --tenant NAME --name NAME`."""

from uuid import UUID

import click
from sqlalchemy import Connection

from api.auth import SCOPES, key_digest, new_key
from common.db.sessions import sync_engine
from common.db.upkeep import ADD_KEY, ADD_TENANT, LIST_KEYS, REVOKE_KEY
from common.domain.ids import new_id
from common.settings import DatabaseSettings, read


def _connect() -> Connection:
    return sync_engine(read(DatabaseSettings), 1).connect()


@click.group(help="API keys in the job store at LATENTMILL_DATABASE_URL.")
def main() -> None:
    """Entry point."""


@main.command(help="Make a key and print it. It cannot be shown again.")
@click.option("--tenant", required=True, help="Whose jobs it reaches; made when new.")
@click.option("--name", required=True, help="What the key is for.")
@click.option("--scope", "scopes", multiple=True, type=click.Choice(SCOPES), default=("jobs:read", "jobs:write"))
@click.option("--quiet", is_flag=True, help="Print the key alone.")
def create(tenant: str, name: str, scopes: tuple[str, ...], *, quiet: bool) -> None:
    """Make a key."""
    key, key_id = new_key(), new_id()
    with _connect() as connection:
        tenant_id = connection.execute(ADD_TENANT, {"id": str(new_id()), "name": tenant}).scalar_one()
        values = {
            "id": str(key_id),
            "tenant_id": str(tenant_id),
            "name": name,
            "sha256": key_digest(key),
            "scopes": list(scopes),
        }
        connection.execute(ADD_KEY, values)
    click.echo(key)
    if not quiet:
        click.echo(f"id {key_id}, tenant {tenant}, {' '.join(scopes)}. Keep the key: it is not stored.", err=True)


@main.command("list", help="List keys; of each its id, tenant, name, scopes and whether it works.")
def list_keys() -> None:
    """List keys."""
    with _connect() as connection:
        for row in connection.execute(LIST_KEYS):
            state = "works" if row.works else "dead"
            click.echo(f"{row.id}  {state}  {row.tenant}  {row.name}  {' '.join(row.scopes)}")


@main.command(help="Revoke the key with this ID; it stops working within ten seconds.")
@click.argument("key_id", metavar="ID", type=click.UUID)
def revoke(key_id: UUID) -> None:
    """Revoke a key."""
    with _connect() as connection:
        if connection.execute(REVOKE_KEY, {"id": str(key_id)}).one_or_none() is None:
            message = f"no key {key_id} works"
            raise click.ClickException(message)


if __name__ == "__main__":
    main()
