"""API keys: `lm_`, 43 random characters and a checksum. Postgres keeps their SHA-256, each bound to a tenant."""

import asyncio
import hashlib
import secrets
import string
import time
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncEngine

from api.fetch import fetch
from api.problems import refusal
from common.db.readings import KEY_BY_HASH
from common.domain.errors import INSUFFICIENT_SCOPE, UNAUTHENTICATED

SCOPES = ("jobs:read", "jobs:write", "admin")
_PREFIX = "lm_"
_ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase  # base62: a double click selects it all
_RANDOM_CHARS = 43  # 256 bits
_CHECKSUM_CHARS = 6  # base62 of a CRC-32: a mistyped key is told from an unknown one without asking anybody
_BEARER = "bearer "

# A revoked key works for at most this long, and a request costs no query in between.
_KNOWN_FOR_S = 10.0
# A new key works at once; a flood of one wrong key costs one query a second.
_UNKNOWN_FOR_S = 1.0
# About 300 bytes each.
_MAX_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is calling, and what the key allows."""

    key_id: UUID
    tenant_id: UUID
    scopes: frozenset[str]

    def require(self, scope: str) -> None:
        """Raise LatentmillError (insufficient_scope) unless the key allows this."""
        if not self.allows(scope):
            raise refusal(INSUFFICIENT_SCOPE, f"the key lacks the scope {scope}")

    def allows(self, scope: str) -> bool:
        """Whether the key has the scope; admin includes all."""
        return scope in self.scopes or "admin" in self.scopes


@dataclass(frozen=True, slots=True)
class _Remembered:
    principal: Principal | None
    until: float


class KeyRing:
    """Looks keys up, and remembers the answers for seconds."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._remembered: OrderedDict[bytes, _Remembered] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[Principal | None]] = {}

    async def authenticate(self, key: str | None) -> Principal:
        """The owner of a key. Raises LatentmillError (unauthenticated), or SQLAlchemy's errors."""
        if key is None:
            raise refusal(UNAUTHENTICATED, "send an API key: Authorization: Bearer lm_...")
        if not well_formed(key):
            raise refusal(UNAUTHENTICATED, "the API key is malformed or mistyped")
        # Comparing digests leaks nothing: who does not know a key cannot steer what its SHA-256 begins with.
        digest = key_digest(key)
        known = self._remembered.get(digest)
        principal = known.principal if known and known.until > time.monotonic() else await self._ask(digest)
        if principal is None:
            raise refusal(UNAUTHENTICATED, "the API key is unknown, expired or revoked")
        return principal

    async def _ask(self, digest: bytes) -> Principal | None:
        # When a busy key's memory runs out, its next hundred requests share one query.
        task = self._asking.get(digest)
        if task is None:
            task = self._asking[digest] = asyncio.create_task(self._look_up(digest))
            task.add_done_callback(lambda _: self._asking.pop(digest, None))
        return await asyncio.shield(task)

    async def _look_up(self, digest: bytes) -> Principal | None:
        rows = await fetch(self._engine, KEY_BY_HASH, {"sha256": digest})
        principal = Principal(rows[0].id, rows[0].tenant_id, frozenset(rows[0].scopes)) if rows else None
        self._remember(digest, principal)
        return principal

    def _remember(self, digest: bytes, principal: Principal | None) -> None:
        kept_for = _UNKNOWN_FOR_S if principal is None else _KNOWN_FOR_S
        self._remembered[digest] = _Remembered(principal, time.monotonic() + kept_for)
        self._remembered.move_to_end(digest)
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.popitem(last=False)


def new_key() -> str:
    """A key nobody has seen before."""
    body = "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM_CHARS))
    return _PREFIX + body + _checksum(body)


def well_formed(key: str) -> bool:
    """Whether the text can be a key at all: right length, right characters, right checksum."""
    body = key[len(_PREFIX) : -_CHECKSUM_CHARS]
    return (
        key.startswith(_PREFIX)
        and len(body) == _RANDOM_CHARS
        and set(body) <= set(_ALPHABET)
        and key[-_CHECKSUM_CHARS:] == _checksum(body)
    )


def key_digest(key: str) -> bytes:
    """What is stored of a key. With 256 random bits there is nothing to guess, so a plain fast hash is right."""
    return hashlib.sha256(key.encode()).digest()


def bearer_key(authorization: str | None) -> str | None:
    """The key in an Authorization header; an empty text for another scheme, None without a header."""
    if authorization is None:
        return None
    return authorization[len(_BEARER) :].strip() if authorization[: len(_BEARER)].lower() == _BEARER else ""


def _checksum(body: str) -> str:
    value, digits = zlib.crc32(body.encode()), ""
    for _ in range(_CHECKSUM_CHARS):
        value, digit = divmod(value, len(_ALPHABET))
        digits = _ALPHABET[digit] + digits
    return digits
