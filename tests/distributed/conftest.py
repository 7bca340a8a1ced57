"""Fixtures that run the tests of this folder on several ranks."""

from collections.abc import Iterator

import pytest

from tests.distributed.world import Worlds, is_rank


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run a rank's tests in its own process one after another: all ranks run the same."""
    if is_rank() and hasattr(config.option, "numprocesses"):
        config.option.numprocesses = 0
        config.option.dist = "no"


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Return the groups of rank processes, which are kept between tests."""
    found = Worlds()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def alone(many_processes: None) -> None:
    """Use `many_processes` in all of this folder."""
