"""Set log levels for the command line: hide messages of libraries, and show those of this package."""

import faulthandler
import logging
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_OWN = "megatron_mamba_cache"
_PROGRESS = f"{_OWN}.kernels.progress"
# Importing torch sets the level of the torch logger, so child loggers need their own levels.
_OTHERS = ("megatron", "torch", "torch.utils.cpp_extension")

LEVELS = ("debug", "info", "warning", "error")
"""Allowed values of --log-level."""


@contextmanager
def quiet_libraries(level: str = "warning") -> Iterator[None]:
    """Context manager: show messages of this package from `level` up; "debug" also shows those of libraries."""
    shown = logging.getLevelNamesMapping()[level.upper()]
    own, others = logging.getLogger(_OWN), [logging.getLogger(name) for name in _OTHERS]
    loggers = [own, *others]
    levels = [logger.level for logger in loggers]
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    for logger in others:
        logger.setLevel(logging.DEBUG if shown == logging.DEBUG else logging.ERROR)
    own.setLevel(shown)
    own.addHandler(handler)
    propagate, own.propagate = own.propagate, False
    try:
        with warnings.catch_warnings():
            if shown > logging.DEBUG:
                warnings.simplefilter("ignore")
            yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
        own.removeHandler(handler)
        own.propagate = propagate


def hide_stacks_of_signals() -> None:
    """Unregister megatron-core's handlers that print stacks on SIGTERM and SIGINT."""
    import megatron.core.inference.data_parallel_inference_coordinator  # noqa: F401  # imports torch

    for number in (signal.SIGTERM, signal.SIGINT):
        faulthandler.unregister(number)


class _StderrHandler(logging.Handler):
    """Writes warnings to the current stderr, and errors to the original stderr, which may not be redirected."""

    def __init__(self) -> None:
        super().__init__()
        self._real = sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        stream = self._real if record.levelno >= logging.ERROR else sys.stderr
        print(self.format(record), file=stream, flush=True)


@contextmanager
def own_warnings_hidden() -> Iterator[None]:
    """Context manager: hide this package's warnings, but not its progress messages."""
    own, progress = logging.getLogger(_OWN), logging.getLogger(_PROGRESS)
    levels = own.level, progress.level
    own.setLevel(logging.ERROR)
    progress.setLevel(logging.WARNING)
    try:
        yield
    finally:
        own.setLevel(levels[0])
        progress.setLevel(levels[1])
