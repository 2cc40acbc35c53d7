"""Who is calling."""

from starlette.requests import Request

from api.auth import Principal, bearer_key
from api.resources import resources_of


async def caller(request: Request, scope: str) -> Principal:
    """The owner of the request's key. Raises LatentmillError (unauthenticated, insufficient_scope)."""
    key = bearer_key(request.headers.get("authorization"))
    principal = await resources_of(request).keys.authenticate(key)
    principal.require(scope)
    return principal
