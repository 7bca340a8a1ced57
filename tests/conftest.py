"""Fixtures and settings shared by all tests."""

import fcntl
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.usual_settings import set_usual

# Megatron has torch compile some functions, which takes a C++ compiler half a minute; processes of tests inherit this.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# The same examples on every run; HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("pinned", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "pinned"))

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options that enable long and slow tests."""
    parser.addoption("--run-long", action="store_true", help="run the tests marked long too, as CI does")
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--run-clients", action="store_true", help="run the tests marked clients too")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of optional tests."""
    config.addinivalue_line("markers", "clients: drives other projects' clients; only with --run-clients")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip long and slow tests unless they are enabled."""
    for marker in ("long", "slow", "clients"):
        if not config.getoption(f"--run-{marker}"):
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=f"{marker}; --run-{marker} runs it"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report the clients that ran and their releases."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for script, versions in (value for name, value in report.user_properties if name == "client"):
                terminalreporter.write_line(f"{outcome:8}{script:28}{versions}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests over workers by file."""
    from tests.file_scheduling import FilesTogether

    return FilesTogether(config, log)


def pytest_collection_finish() -> None:
    """Exclude all imported objects from later garbage collections: each engine that is built starts some."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def usual_settings() -> None:
    """Apply the usual settings of tests."""
    set_usual()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Yield each device of this machine."""
    return request.param


@pytest.fixture(scope="session")
def one_world_at_a_time() -> Callable[[], AbstractContextManager[None]]:
    """Return a context for several busy processes: it waits for those of other workers of this run."""
    return _one_world_at_a_time


@pytest.fixture
def many_processes(one_world_at_a_time: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Run a test of several busy processes while no other such test runs in any worker of this run."""
    with one_world_at_a_time():
        yield


@contextmanager
def _one_world_at_a_time() -> Iterator[None]:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # the ranks of torchrun run the same test at the same time
        yield
        return
    name = f"many_processes_{os.getuid()}_{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
