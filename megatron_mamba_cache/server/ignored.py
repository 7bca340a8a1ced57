"""Count parts of requests that have no effect; log a part when its count is 1, 10, 100 and so on."""

import logging
import threading
from collections import Counter
from collections.abc import Iterable

logger = logging.getLogger(__name__)

_MOST_NAMES = 1000  # names are the clients' own

_counts: Counter[tuple[str, str]] = Counter()
_lock = threading.Lock()


def note_ignored(reason: str, names: Iterable[str]) -> None:
    """Count parts of a request that are ignored, and log those whose count is 1, 10, 100 and so on.

    Args:
        reason: Why, in words that fit all of them.
    """
    with _lock:
        counts = {}
        for name in dict.fromkeys(names):
            key = (reason, name[:100])
            if key not in _counts and len(_counts) >= _MOST_NAMES:
                key = (reason, "others")
            _counts[key] += 1
            counts[key[1]] = _counts[key]
    due = {name: count for name, count in counts.items() if str(count).strip("0") == "1"}
    if due:
        shown = ", ".join(f"{name!r} ({count:,} so far)" for name, count in due.items())
        logger.warning("ignored in requests: %s: %s", shown, reason)
