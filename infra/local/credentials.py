"""Random passwords, made once per stack and kept in a file that only its owner can read."""

import json
import secrets
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from infra.local.layout import write_private


@dataclass(frozen=True, slots=True)
class Credentials:
    """Passwords and keys of the servers, the media edge and Erlang's cookie. URL-safe, never shown in a repr."""

    postgres: str = field(repr=False)
    redis: str = field(repr=False)
    rabbitmq: str = field(repr=False)
    s3_access_key: str = field(repr=False)
    s3_secret_key: str = field(repr=False)
    s3_volume_write: str = field(repr=False)
    s3_volume_read: str = field(repr=False)
    s3_filer_write: str = field(repr=False)
    s3_filer_read: str = field(repr=False)
    edge: str = field(repr=False)
    erlang_cookie: str = field(repr=False)


def load_or_make(path: Path) -> Credentials:
    """Return the stack's credentials, making those that are missing."""
    known = json.loads(path.read_text()) if path.exists() else {}
    # hex, because it needs no quoting in any of the servers' configuration files and URLs.
    made = {item.name: secrets.token_hex(20) for item in fields(Credentials)}
    credentials = Credentials(**(made | known))
    if asdict(credentials) != known:
        write_private(path, json.dumps(asdict(credentials), indent=1))
    return credentials
