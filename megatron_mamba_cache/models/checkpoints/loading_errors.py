"""Texts of errors that are raised while a checkpoint is loaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_NAMES_SHOWN = 8


@contextmanager
def naming_source(source: str | Path) -> Iterator[None]:
    """Context manager that names `source`, which describes the model, in errors raised while the model is built."""
    try:
        yield
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{source} describes a model that Megatron cannot build: {error}") from error
    except MemoryError as error:
        raise MemoryError(f"{source}: {error}") from error


def listed(names: Sequence[str]) -> str:
    """Return text for error messages with the number of tensors and the first few of their names."""
    return f"{len(names)} tensors: {shortened(names)}"


def shortened(names: Sequence[str]) -> str:
    """Return text for error messages with the first few names and the number of names left out."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(names[:_NAMES_SHOWN])}{more}"
