"""Fixtures for a coordinator and for a replica's link."""

from collections.abc import Iterator

import pytest

from tests.replicas.peers import Service
from tests.replicas.replica_line import Line


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """Run a coordinator until the test ends; an optional fixture parameter gives its settings."""
    made = Service(**getattr(request, "param", {}))
    yield made
    made.end()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.link.close()
    made.context.destroy(linger=0)
