"""The ranks that hold one model together: tensor parallel times pipeline parallel, one replica of it.

Each rank reaches every decision by itself, so ranks exchange little: what memory allows, once; the sampled tokens, once
a step; and whether drafting failed, where there are drafts. Every method is collective: all ranks call it, in the same
order.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..errors import CacheError

Result = TypeVar("Result")


class Ranks(Protocol):
    """One rank's place among the ranks of a model, and what it exchanges with them."""

    num_ranks: int
    index: int
    num_stages: int
    is_first_stage: bool
    is_last_stage: bool

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, first stage first and in it in tensor-parallel order."""

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the least of each value over all ranks; 64 bits each."""

    def all_hold(self, holds: bool) -> bool:
        """Return whether something holds on all ranks."""

    def from_source(self, tensor: Tensor) -> Tensor:
        """Make a tensor on every rank what it is on the first rank of the last stage, in place, and return it.

        CUDA-graph safe with NCCL; does not wait for the device.
        """


class OneRank:
    """The `Ranks` of a model that this rank holds as a whole."""

    num_ranks = 1
    index = 0
    is_first_stage = is_last_stage = True
    num_stages = 1

    def gather(self, value: Any) -> list[Any]:
        """Return the one value."""
        return [value]

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the values."""
        return list(values)

    def all_hold(self, holds: bool) -> bool:
        """Return whether it holds here."""
        return holds

    def from_source(self, tensor: Tensor) -> Tensor:
        """Return the tensor as it is."""
        return tensor


def on_all_ranks(ranks: Ranks, compute: Callable[[], Result]) -> Result:
    """Return what each rank computes for itself; if one fails, raise on all, so that none waits for it.

    Raises:
        ValueError, TypeError, CacheError: What this rank raised, else what the first failed rank did, with its number.
    """
    error: Exception | None = None
    try:
        result = compute()
    except (ValueError, TypeError, CacheError) as found:
        error = found
    errors = ranks.gather(None if error is None else (type(error), str(error)))
    if error is not None:
        raise error
    for rank, failure in enumerate(errors):
        if failure is not None:
            kind, message = failure
            raise kind(f"on rank {rank} of the model: {message}")
    return result
