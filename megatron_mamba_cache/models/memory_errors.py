"""Allocation errors that name the model's largest sizes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_SIZES_SHOWN = 4


@contextmanager
def largest_sizes_named(fields: Mapping[str, Any]) -> Iterator[None]:
    """Turn torch's allocation errors, which name no setting, into one that names the model's largest sizes.

    Args:
        fields: Fields of an architecture; integers, also in nested mappings, are sizes.

    Raises:
        MemoryError: If the block fails to allocate.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        sizes = sorted(_sizes("", fields), key=lambda size: size[1], reverse=True)
        largest = ", ".join(f"{name}={size}" for name, size in sizes[:_SIZES_SHOWN])
        raise MemoryError(f"the weights do not fit in memory; the model's largest sizes are {largest}") from error


def _sizes(prefix: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _sizes(f"{prefix}{name}.", value)
        elif type(value) is int:
            yield f"{prefix}{name}", value
