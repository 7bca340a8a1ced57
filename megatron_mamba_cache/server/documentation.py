"""`/docs`: Swagger UI for the server's OpenAPI schema, without assets from other hosts."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from .errors import ApiError

_PACKAGE = "fastapi_offline"
_ASSETS = "docs/assets"
_NO_ICON = "data:,"


def add_documentation(app: FastAPI, *, needs_key: bool) -> None:
    """Add `/docs` and its assets; call this before the schema is built.

    Args:
        needs_key: Whether requests need an API key; if so, the page has a button to enter one.
    """
    if needs_key:
        _describe_key(app)
    folder = _asset_folder()
    if folder is not None:
        app.mount(f"/{_ASSETS}", StaticFiles(directory=folder))

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> Response:
        if folder is None:
            raise ApiError(501, "/docs needs fastapi-offline: pip install fastapi-offline", "not_installed")
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=app.title,
            swagger_js_url=f"{_ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{_ASSETS}/swagger-ui.css",
            swagger_favicon_url=_NO_ICON,
            swagger_ui_parameters={"validatorUrl": None},
        )


def _asset_folder() -> Path | None:
    """Return the folder of Swagger UI's files; None if their package is not installed."""
    found = find_spec(_PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).with_name("static")


def _describe_key(app: FastAPI) -> None:
    """Add the API key to the schema as a security scheme."""
    plain = app.openapi

    def with_key() -> dict[str, Any]:
        description = plain()
        schemes = description.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["API key"] = {"type": "http", "scheme": "bearer"}
        description["security"] = [{"API key": []}]
        return description

    app.openapi = with_key  # type: ignore[method-assign]
