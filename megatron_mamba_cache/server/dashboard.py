"""The dashboard: one self-contained page, and the history that its charts show."""

import math
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse, JSONResponse

from .history import History

_PAGE = Path(__file__).with_name("dashboard.html")


def dashboard_routes(history: History, model_name: str) -> APIRouter:
    """Return the routes below `/dashboard`."""
    router = APIRouter(prefix="/dashboard")

    @router.get("", response_class=HTMLResponse)
    async def dashboard() -> HTMLResponse:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"Cache-Control": "no-store"})

    @router.get("/history", include_in_schema=False)
    async def past(after: float = -math.inf) -> JSONResponse:
        body = {"model": model_name, **history.body(after)}
        return JSONResponse(body, headers={"Cache-Control": "no-store"})

    return router
