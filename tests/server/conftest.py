"""One server of the shipped model for all tests that do not need settings of their own."""

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server.running_server import RunningServer

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "anthropic", "openai", "httpx", "transformers", "schemathesis")
collect_ignore_glob = ["test_*.py"] if any(importlib.util.find_spec(name) is None for name in NEEDED) else []


@pytest.fixture(scope="session")
def shared_server() -> Iterator["RunningServer"]:
    """Run the server that tests share: the shipped model, two API keys."""
    from tests.server.running_server import KEYS, running_server

    with running_server(*KEYS) as running:
        yield running


@pytest.fixture
def server(shared_server: "RunningServer") -> Iterator["RunningServer"]:
    """Return the shared server, nothing cached; afterwards nothing may be held."""
    shared_server.between_steps(lambda engine: engine.flush())
    yield shared_server
    shared_server.assert_nothing_held()
