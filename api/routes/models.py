"""GET /v1/models: what can be asked for."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from api.routes.callers import caller
from common.domain.profiles import PROFILES, ModelProfile

router = APIRouter(tags=["models"])


@router.get("/v1/models", summary="The models, with what each accepts and its defaults")
async def list_models(request: Request) -> Response:
    """Sizes in pixels, ranges with both ends included."""
    await caller(request, "jobs:read")
    return JSONResponse({"object": "list", "data": [_profile(profile) for profile in PROFILES.values()]})


def _profile(profile: ModelProfile) -> dict[str, Any]:
    body = asdict(profile)
    body["sizes"] = [f"{width}x{height}" for width, height in profile.sizes]
    return {"id": body.pop("model"), "object": "model", **body}
