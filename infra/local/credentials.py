"""Random passwords, made once per stack and kept in a file that only its owner can read."""

import json
import secrets
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from infra.local.layout import write_private


@dataclass(frozen=True, slots=True)
class Credentials:
    """One password for each server, the media edge and Erlang's cookie. URL-safe, never shown in a repr."""

    postgres: str = field(repr=False)
    redis: str = field(repr=False)
    rabbitmq: str = field(repr=False)
    s3_access_key: str = field(repr=False)
    s3_secret_key: str = field(repr=False)
    edge: str = field(repr=False)
    erlang_cookie: str = field(repr=False)


def load_or_make(path: Path) -> Credentials:
    """Return the stack's credentials, making them on the first call."""
    if not path.exists():
        # hex, because it needs no quoting in any of the servers' configuration files and URLs.
        made = Credentials(**{item.name: secrets.token_hex(20) for item in fields(Credentials)})
        write_private(path, json.dumps(asdict(made), indent=1))
    return Credentials(**json.loads(path.read_text()))
