"""Show progress while weights load: a progress bar on a terminal, else a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

LINE_EVERY_S = 5.0


@contextmanager
def loading_progress(total: int) -> Iterator[Callable[[], object]]:
    """Yield a function to call after each of `total` tensors. Without a terminal, short loads print nothing."""
    if sys.stderr.isatty():
        with tqdm(total=total, desc="loading", unit="tensor", file=sys.stderr) as bar:
            yield bar.update
        return
    num_loaded, last = 0, time.monotonic()

    def advance() -> None:
        nonlocal num_loaded, last
        num_loaded += 1
        now = time.monotonic()
        if now - last >= LINE_EVERY_S:
            last = now
            print(f"loading weights: {num_loaded} of {total} tensors", file=sys.stderr, flush=True)

    yield advance
