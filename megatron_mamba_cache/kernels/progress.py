"""Log messages for slow operations."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, Timer

_SILENT_S = 2.0
_LOG = logging.getLogger(__name__)
_speaker = Lock()


class ProgressLine:
    """Timer for one operation: if it takes more than 2 s, logs a message and, at the end, the duration.

    If operations overlap, only the first one is logged.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._began = time.perf_counter()
        self._may_speak = _speaker.acquire(blocking=False)
        self._has_spoken = False
        self._timer = Timer(_SILENT_S, self._speak)
        self._timer.daemon = True
        if self._may_speak:
            self._timer.start()

    def end(self) -> None:
        """End the operation; later calls do nothing."""
        self._timer.cancel()
        if self._has_spoken:
            _LOG.warning("... done after %.0f s", time.perf_counter() - self._began)
        if self._may_speak:
            _speaker.release()
        self._may_speak = self._has_spoken = False

    def _speak(self) -> None:
        self._has_spoken = True
        _LOG.warning("%s ...", self._message)


@contextmanager
def progress(message: str) -> Iterator[None]:
    """Context manager that logs `message` if its body takes longer than 2 s."""
    line = ProgressLine(message)
    try:
        yield
    finally:
        line.end()
