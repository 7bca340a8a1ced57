"""The ranks that hold one model together, tensor parallel times pipeline parallel, and those that share its experts.

Each rank reaches every decision by itself, so ranks exchange little: what memory allows, once; the sampled tokens, once
a step; and whether drafting failed, where there are drafts. Every method is collective: all ranks call it, in the same
order.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from .raised_error import RaisedError

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
    """Return what each rank computes for itself; if one fails, raise the same error on all, so that no rank waits.

    Raises:
        Exception: What the first failed rank raised, with a note of its number unless all raised the same. An error of
            a type that is neither a builtin nor this package's, or that another rank cannot make, is a `RuntimeError`
            that names the type.
    """
    error: Exception | None = None
    try:
        result = compute()
    except Exception as found:
        error = found
    if ranks.num_ranks == 1:
        if error is not None:
            raise error
        return result
    raised = ranks.gather(None if error is None else RaisedError.of(error))
    failed = next((rank for rank, found in enumerate(raised) if found is not None), None)
    if failed is None:
        return result
    shared = _shared_error(ranks, failed, raised[failed], error)
    if any(found != raised[failed] for found in raised):
        shared.add_note(f"raised on rank {failed} of the model")
    raise shared


def _shared_error(ranks: Ranks, failed: int, raised: RaisedError, mine: Exception | None) -> Exception:
    """Return the error of one rank as all of them raise it."""
    shared = raised.rebuilt()
    is_known = ranks.all_hold(shared is not None)
    if shared is None or not is_known:
        shared = raised.renamed()
    if ranks.index == failed and mine is not None:
        if is_known:
            shared = mine
        else:
            shared.__cause__ = mine
    return shared


class ExpertPeers(Protocol):
    """One rank's link to the ranks that it shares experts with.

    Each has requests of its own; all compute each step together and make the same calls in the same order.
    """

    num_ranks: int

    def greatest(self, values: Sequence[int]) -> list[int]:
        """Return the greatest of each value over all ranks; 64 bits each. Waits for the ranks, not for the device."""


class NoPeers:
    """The `ExpertPeers` of a rank that has all experts."""

    num_ranks = 1

    def greatest(self, values: Sequence[int]) -> list[int]:
        """Return the values."""
        return list(values)
