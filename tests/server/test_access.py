"""Routes that the access middleware guards."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from megatron_mamba_cache.server.backend import BackendState
from tests.server.front_end import front_end, scripted_server
from tests.server.scripted_backend import ScriptedBackend

OPEN_PATHS = {"/ping"}
"""Paths that take a POST from any client, whether or not the server is ready."""


def posting_paths(routes: Iterable[Any]) -> Iterator[str]:
    """Yield the path of each route with a method other than GET, including routes in routers."""
    for route in routes:
        router = getattr(route, "original_router", None)  # FastAPI keeps an included router as one route
        if router is not None:
            yield from posting_paths(router.routes)
        elif (getattr(route, "methods", None) or set()) - {"GET", "HEAD"}:
            yield route.path


@pytest.mark.parametrize("is_draining", [False, True], ids=["not ready", "draining"])
def test_post_routes_except_open_paths_return_503_until_the_server_is_ready(is_draining: bool) -> None:
    """A path that fails here is missing in `_SERVED_PATHS`, so its bodies have no limits either."""
    app = scripted_server()._build()
    paths = set(posting_paths(app.routes))
    described = {path for path, operations in app.openapi()["paths"].items() if "post" in operations}
    assert OPEN_PATHS < described <= paths
    with front_end(backend=ScriptedBackend(BackendState(is_ready=is_draining))) as server, server.client() as http:
        if is_draining:
            server.server.drain()
        replies = {path: http.post(path, json={}).json() for path in paths}
    errors = {path: reply.get("error", {}) for path, reply in replies.items()}
    codes = {path: error.get("code", error.get("type")) for path, error in errors.items()}
    needed = "shutting_down" if is_draining else "not_ready"
    codes = {path: needed if code == "overloaded_error" else code for path, code in codes.items()}  # Anthropic's word
    assert {path for path, code in codes.items() if code != needed} == OPEN_PATHS, codes
