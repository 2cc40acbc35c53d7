"""Health checks: /livez says that the process serves, /readyz that it can take jobs."""

import asyncio

from fastapi import APIRouter, Request
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.responses import JSONResponse, Response

from api.fetch import fetch
from api.problems import RETRY_AFTER_S
from api.resources import resources_of

# A load balancer asks every few seconds and gives an answer about as long.
_BOUND_S = 1.0

router = APIRouter(tags=["health"])


@router.get("/livez", summary="The process serves")
async def livez() -> Response:
    """Always 200: a restart cures nothing that the process depends on."""
    return JSONResponse({"status": "ok"})


@router.get("/readyz", summary="The process can take jobs")
async def readyz(request: Request) -> Response:
    """503 without Postgres or while leaving. Without the broker or Redis jobs are taken all the same."""
    resources = resources_of(request)
    database = await _answers(resources.engine)
    ready = database and not resources.hub.closed
    body = {
        "status": "ok" if ready else "unavailable",
        "postgres": database,
        "broker": resources.publisher.connected,
        "redis": resources.hub.listening,
    }
    return JSONResponse(body, 200) if ready else JSONResponse(body, 503, {"Retry-After": str(RETRY_AFTER_S)})


async def _answers(engine: AsyncEngine) -> bool:
    try:
        async with asyncio.timeout(_BOUND_S):
            await fetch(engine, text("SELECT 1"), {})
    except (SQLAlchemyError, TimeoutError):
        return False
    return True
