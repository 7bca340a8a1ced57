"""A coordinator for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.replicas.peers import Service


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """Serve until the test ends; its parameter, if it has one, is settings."""
    made = Service(**getattr(request, "param", {}))
    yield made
    made.end()
