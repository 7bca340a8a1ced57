"""Assignment of tests to the workers of pytest-xdist."""

from typing_extensions import override
from xdist.scheduler import LoadScopeScheduling

_OF_PROCESSES = ("tests/distributed/", "tests/replicas/", "tests/docs/test_run.py")
"""The folders of nearly all tests that use `many_processes`."""


class FilesTogether(LoadScopeScheduling):
    """Each worker runs whole files, so that their fixtures are made once, and one worker all that start processes.

    If more did, one would wait while the processes of another's test keep the cores busy.
    """

    @override
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "processes" if file.startswith(_OF_PROCESSES) else file
