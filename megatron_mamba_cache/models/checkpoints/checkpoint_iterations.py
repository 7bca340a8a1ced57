"""Which directory holds a Megatron checkpoint's weights when training has saved several iterations."""

from pathlib import Path

_TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_MAX_DIGITS = 12


def weights_directory(directory: Path) -> Path:
    """Return the directory of the latest iteration; the directory itself if it has no tracker file.

    Raises:
        ValueError: Naming the file if it names no iteration, or the iteration's directory if it is missing.
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
