"""`/docs`: Swagger UI for the server's OpenAPI schema, grouped, without assets from other hosts."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from .errors import ApiError

_PACKAGE = "fastapi_offline"
_ASSETS = "docs/assets"
_NO_ICON = "data:,"

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "OpenAI": "Chat completions, completions and responses, for OpenAI's clients",
        "Anthropic": "Messages, for Anthropic's clients",
        "Tokens": "Text to token ids and back, in vLLM's format",
        "Probes and metrics": "For orchestrators and Prometheus",
        "Administration": "These need an admin key if one is set",
    }
)
"""The groups of the page and what is in them."""

OPERATIONS: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType(
    {
        ("post", "/v1/chat/completions"): ("OpenAI", "Reply to a chat"),
        ("post", "/v1/completions"): ("OpenAI", "Continue prompts"),
        ("post", "/v1/responses"): ("OpenAI", "Create a response"),
        ("get", "/v1/responses/{response_id}"): ("OpenAI", "Get a stored response"),
        ("delete", "/v1/responses/{response_id}"): ("OpenAI", "Delete a stored response"),
        ("get", "/v1/models"): ("OpenAI", "List the served models"),
        ("get", "/v1/models/{name}"): ("OpenAI", "Describe a model"),
        ("post", "/v1/messages"): ("Anthropic", "Reply to messages"),
        ("post", "/v1/messages/count_tokens"): ("Anthropic", "Count the tokens of messages"),
        ("post", "/tokenize"): ("Tokens", "Tokenize a text or messages"),
        ("post", "/detokenize"): ("Tokens", "Turn token ids into text"),
        ("get", "/tokenizer_info"): ("Tokens", "Describe the tokenizer and its chat template"),
        ("get", "/health"): ("Probes and metrics", "Check that requests are served"),
        ("get", "/ping"): ("Probes and metrics", "Check that requests are served, for SageMaker"),
        ("post", "/ping"): ("Probes and metrics", "Check that requests are served, for SageMaker"),
        ("get", "/version"): ("Probes and metrics", "List versions"),
        ("get", "/metrics"): ("Probes and metrics", "Report metrics for Prometheus"),
        ("get", "/dashboard"): ("Probes and metrics", "Show the dashboard"),
        ("post", "/admin/flush"): ("Administration", "Make the cache unreachable, after loading new weights"),
        ("get", "/admin/weights"): ("Administration", "Return the version of the weights"),
    }
)
"""The group and the summary of each operation, by method and path; a test finds an operation without them."""


def add_documentation(app: FastAPI, *, needs_key: bool) -> None:
    """Add `/docs` and its assets; call this before the schema is built.

    Args:
        needs_key: Whether requests need an API key; if so, the page has a button to enter one.
    """
    _describe(app, needs_key=needs_key)
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


def _describe(app: FastAPI, *, needs_key: bool) -> None:
    """Add groups and summaries to the schema, and the API key as a security scheme."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        schema = plain()
        schema["tags"] = [{"name": name, "description": text} for name, text in GROUPS.items()]
        for path, operations in schema["paths"].items():
            for method, operation in operations.items():
                if (method, path) in OPERATIONS:
                    group, operation["summary"] = OPERATIONS[method, path]
                    operation["tags"] = [group]
        if needs_key:
            schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
            schemes["API key"] = {"type": "http", "scheme": "bearer"}
            schema["security"] = [{"API key": []}]
        return schema

    app.openapi = described  # type: ignore[method-assign]
