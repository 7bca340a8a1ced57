"""Request counts and outcome of a step, which are reported to Megatron."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..policy.block_growth import GrowthOutcome
from ..policy.kept_tokens import StepTokens
from ..policy.requests import RunningRequest
from .log_probs import StepLogProbs
from .step import Step


class StepCounts(NamedTuple):
    """Request and token counts of the scheduled or laid-out step; see `RequestCounts`.

    Args:
        tokens: Number of tokens to compute; includes drafts after the step is laid out.
        padded_tokens, padded_requests: Numbers that the device computes in the last laid-out step, padding included.
    """

    requests: int = 0
    paused: int = 0
    prefilling: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    padded_requests: int = 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Result of a step: kept tokens, draft counts, log-probabilities, and the requests that were paused or evicted.

    Args:
        num_drafts: [requests] number of verified drafts.
        held_back: Requests that were paused or evicted after the step.
    """

    step: Step
    kept: StepTokens
    num_drafts: Sequence[int]
    log_probs: StepLogProbs
    held_back: GrowthOutcome


class RunnerCount:
    """Descriptor for a count that Megatron reads from the context; returns the runner's value and ignores assignment.

    Args:
        name: Field of `StepCounts`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, context: Any, owner: type | None = None) -> int:
        count: int = getattr(context.counts, self._name)
        return count

    def __set__(self, context: Any, value: int) -> None:
        """Ignore an assignment by Megatron's classes."""


def ids_of(requests: Sequence[RunningRequest]) -> Tensor | None:
    """Return the request ids, [requests] int64; None if `requests` is empty."""
    return torch.tensor([request.request_id for request in requests], dtype=torch.int64) if requests else None
