"""Counts of the runner as attributes of the context, where Megatron's classes read them."""

from typing import Protocol

from .step_outcome import StepCounts


class HasCounts(Protocol):
    """A context over a runner."""

    @property
    def counts(self) -> StepCounts:
        """What the next step consists of."""


class RunnerCount:
    """A count that Megatron's classes read of a context; its value is always the runner's.

    Megatron's constructor sets these attributes too; what it sets is ignored.

    Args:
        name: Field of `StepCounts`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, context: HasCounts, owner: type | None = None) -> int:
        count: int = getattr(context.counts, self._name)
        return count

    def __set__(self, context: HasCounts, value: int) -> None:
        """Ignore the value."""
