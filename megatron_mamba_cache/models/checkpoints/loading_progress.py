"""Progress while weights load: a progress bar on a terminal, else a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

LINE_EVERY_S = 5.0


@contextmanager
def loading_progress(total: int) -> Iterator[Callable[[], object]]:
    """Yield what to call after each of `total` tensors; loads shorter than `LINE_EVERY_S` print no line."""
    if sys.stderr.isatty():
        with tqdm(total=total, desc="loading", unit="tensor", file=sys.stderr) as bar:
            yield bar.update
    else:
        yield _Lines(total).advance


class _Lines:
    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._last = time.monotonic()

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._last >= LINE_EVERY_S:
            self._last = now
            print(f"loading weights: {self._done} of {self._total} tensors", file=sys.stderr, flush=True)
