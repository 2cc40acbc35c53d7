"""Signed addresses of finished videos, made whenever a job is read and never stored."""

import base64
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from common.settings import StorageSettings

# A new expiry only every so often: a client that reads its job twice gets the same address, which caches like.
_EXPIRY_GRID_S = 300


@dataclass(frozen=True, slots=True)
class SignedUrl:
    """An address and the Unix time in seconds at which it stops working."""

    url: str
    expires_at: int


class UrlSigner:
    """Signs addresses in the mode of the settings: `edge` (checked by nginx) or `s3` (`presign` makes them)."""

    def __init__(self, settings: StorageSettings, presign: Callable[[str], str]) -> None:
        if settings.url_mode == "edge" and not settings.edge_secret.get_secret_value():
            msg = "LATENTMILL_EDGE_SECRET must be set when LATENTMILL_URL_MODE is edge"
            raise ValueError(msg)
        self._settings = settings
        self._presign = presign

    def sign(self, key: str, now: float | None = None) -> SignedUrl:
        """The address of the object with this key, good for at least url_ttl_s seconds."""
        moment = time.time() if now is None else now
        expires = int(moment + self._settings.url_ttl_s)
        if self._settings.url_mode == "s3":
            return SignedUrl(self._presign(key), expires)
        if self._settings.url_ttl_s >= _EXPIRY_GRID_S:
            expires += -expires % _EXPIRY_GRID_S
        return SignedUrl(edge_url(self._settings, key, expires), expires)


def edge_url(settings: StorageSettings, key: str, expires: int) -> str:
    """An address that nginx's secure_link accepts until `expires` (Unix seconds)."""
    path = f"/v/{key}"
    secret = settings.edge_secret.get_secret_value()
    # secure_link knows MD5 only. The secret is at the end and random, so extending a known hash gains nothing.
    digest = hashlib.md5(f"{expires}{path} {secret}".encode(), usedforsecurity=False).digest()
    signature = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    return f"{settings.public_url.rstrip('/')}{quote(path)}?e={expires}&s={signature}"
