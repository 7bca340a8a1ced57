"""End a process at once when it is done."""

import atexit
import os
import sys
from contextlib import suppress


class QuickEnd:
    """Ends the process after all exit handlers, without the seconds that Python takes to tear down torch and megatron.

    Make it before torch is imported: exit handlers run in the reverse order of their registration. Until `arm` is
    called, the process ends like any other.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        atexit.register(self._end)

    def arm(self, status: int) -> None:
        """Let the process end with a status once its main thread is done."""
        self._status = status

    def _end(self) -> None:
        if self._status is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._status)
