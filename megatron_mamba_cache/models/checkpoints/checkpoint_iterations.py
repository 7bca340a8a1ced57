"""Which directory holds a Megatron checkpoint's weights, where training has left one for each saved iteration."""

from pathlib import Path

_TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_MAX_DIGITS = 12


def weights_directory(directory: Path) -> Path:
    """Return the directory of the latest iteration; the directory itself where it names none.

    Raises:
        ValueError: Naming the file, if it names no iteration, or the directory of the iteration that is not there.
    """
    tracker = directory / _TRACKER
    if not tracker.is_file():
        return directory
    try:
        named = tracker.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {tracker}: {error}") from error
    if named != _RELEASE and not (named.isascii() and named.isdigit() and len(named) <= _MAX_DIGITS):
        raise ValueError(f"{tracker} names the iteration {named!r:.80}, but must hold a number or {_RELEASE!r}")
    latest = directory / (named if named == _RELEASE else f"iter_{int(named):07d}")
    if not latest.is_dir():
        raise ValueError(f"{latest}, which {tracker} names, is no directory; give the directory of one iteration")
    return latest
