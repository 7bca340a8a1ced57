"""Assignment of tests to the workers of pytest-xdist."""

from typing_extensions import override
from xdist.scheduler import LoadScopeScheduling

_OF_PROCESSES = ("tests/distributed/", "tests/replicas/", "tests/docs/test_run.py")
"""The folders of nearly all tests that use `many_processes`."""
_APART = "tests/kernels/test_interpreted.py"
"""Tests without common fixtures, each of which takes as long as many files."""


class FilesTogether(LoadScopeScheduling):
    """Each worker runs whole files, so that their fixtures are made once, and one worker all that start processes.

    If more workers did, one would wait while the processes of another's test keep the cores busy.
    The tests of `_APART` are spread over all workers; scopes with the fewest tests are assigned last.
    """

    @override
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file == _APART:
            return nodeid
        return "processes" if file.startswith(_OF_PROCESSES) else file
