"""Fixtures: one server with the example model for all tests that need no special settings."""

import importlib.util
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.running_server import RunningServer

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "anthropic", "openai", "httpx", "transformers", "schemathesis")
collect_ignore_glob = ["test_*.py"] if any(importlib.util.find_spec(name) is None for name in NEEDED) else []


@pytest.fixture(autouse=True, scope="session")
def schemas_made_once() -> Iterator[None]:
    """Build the OpenAPI schema once for all servers with the same endpoints; it takes most of their startup."""
    if collect_ignore_glob:
        yield
        return
    from fastapi import applications

    make, made = applications.get_openapi, dict[tuple[str, ...], dict[str, Any]]()

    def schema(*, routes: Sequence[Any], **settings: Any) -> dict[str, Any]:
        endpoints = (settings["title"], *_endpoints(routes))
        if endpoints not in made:
            made[endpoints] = make(routes=routes, **settings)
        return deepcopy(made[endpoints])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(applications, "get_openapi", schema)
        yield


def _endpoints(routes: Sequence[Any]) -> Iterator[str]:
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from _endpoints(included.routes)
        elif hasattr(route, "endpoint"):
            yield f"{route.path} {route.endpoint.__module__}.{route.endpoint.__qualname__}"


@pytest.fixture(scope="session")
def shared_server() -> Iterator["RunningServer"]:
    """Run the shared server with the example model and two API keys."""
    from tests.server.running_server import KEYS, running_server

    with running_server(*KEYS) as running:
        yield running


@pytest.fixture
def server(shared_server: "RunningServer") -> Iterator["RunningServer"]:
    """Return the shared server with an empty cache; check afterwards that no request holds resources."""
    shared_server.between_steps(lambda engine: engine.flush())
    yield shared_server
    shared_server.assert_nothing_held()
