"""Who is calling, and whether he still may."""

import asyncio

from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import Request

from api.auth import KeyRing, Principal, bearer_key
from api.resources import resources_of
from api.stream import Stream
from common.domain.errors import INSUFFICIENT_SCOPE, LatentmillError

UNAUTHENTICATED, FORBIDDEN = 4401, 4403
# As long as an answer about a key is remembered: then it costs a query, and asking more often would learn nothing.
_RECHECK_S = 10.0


async def caller(request: Request, scope: str) -> Principal:
    """The owner of the request's key. Raises LatentmillError (unauthenticated, insufficient_scope)."""
    principal = await resources_of(request).keys.authenticate(request_key(request))
    principal.require(scope)
    return principal


def request_key(request: Request) -> str | None:
    """The key that a request was sent with."""
    return bearer_key(request.headers.get("authorization"))


async def watch_key(keys: KeyRing, key: str | None, stream: Stream) -> None:
    """End the stream once its key may not read any more. While Postgres is away nobody knows, and it goes on."""
    while stream.close_code is None:
        await asyncio.sleep(_RECHECK_S)
        try:
            (await keys.authenticate(key)).require("jobs:read")
        except LatentmillError as error:
            expel(stream, error)
        except SQLAlchemyError:
            continue


def expel(stream: Stream, error: LatentmillError) -> None:
    """End the stream of somebody who may not read any more."""
    code = FORBIDDEN if error.kind is INSUFFICIENT_SCOPE else UNAUTHENTICATED
    stream.expel(code, code=error.kind.code, message=error.detail)
