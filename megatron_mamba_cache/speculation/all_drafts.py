"""Draft policy that always drafts, and limits that all draft policies share."""

from collections.abc import Callable, Sequence

from ..policy.requests import RunningRequest

Offers = Callable[[Sequence[RunningRequest], Sequence[int]], Sequence[int]]
"""Looks up at most so many tokens for each request; returns the number of tokens that prompt lookup proposes for it."""


def no_offers(_requests: Sequence[RunningRequest], _most: Sequence[int]) -> Sequence[int]:
    """Return nothing, without prompt lookup."""
    return ()


class AllDrafts:
    """Draft policy that always gives each request as many draft tokens as its limit and the budget allow."""

    by_lookup: Sequence[bool] = ()

    def counts(
        self,
        requests: Sequence[RunningRequest],
        max_counts: Sequence[int],
        budget: int,
        offers: Offers = no_offers,
    ) -> list[int]:
        """Return `max_counts`, reduced to a sum of at most `budget`; earlier requests have priority."""
        return within(max_counts, budget)

    def decide_next(self, requests: Sequence[RunningRequest], most: int) -> None:
        """Do nothing."""

    def of_proposed(self, requests: Sequence[RunningRequest], proposed: Sequence[int]) -> list[int]:
        """Return `proposed` unchanged."""
        return list(proposed)

    def repeats(self, requests: Sequence[RunningRequest], most: int, offers: Offers = no_offers) -> bool:
        """Return True."""
        return True

    def note(
        self,
        request_ids: Sequence[int],
        num_drafted: Sequence[int],
        num_accepted: Sequence[int],
        *,
        by_lookup: bool = False,
    ) -> None:
        """Do nothing."""

    def note_shadows(self, outcomes: Sequence[tuple[int, int, int]]) -> None:
        """Do nothing."""

    def note_step(self, requests: Sequence[RunningRequest], *, asked: bool, drafted: bool) -> None:
        """Do nothing."""

    def stays_paused(self, requests: Sequence[RunningRequest]) -> bool:
        """Return True only if there are no requests."""
        return not requests

    def in_turn(self, requests: Sequence[RunningRequest]) -> Sequence[RunningRequest]:
        """Return nothing."""
        return ()

    def note_offer(self, request_id: int, *, is_found: bool) -> None:
        """Do nothing."""

    def shadowed(self, requests: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Return an empty list, because drafting never pauses."""
        return []

    def resume_if_faster(self, requests: Sequence[RunningRequest], offered: Sequence[int]) -> None:
        """Do nothing."""

    def forget(self, request_id: int) -> None:
        """Do nothing."""


def within(counts: Sequence[int], budget: int) -> list[int]:
    """Return the counts, reduced to a sum of at most `budget`; earlier requests have priority."""
    found = []
    for count in counts:
        found.append(max(0, min(count, budget)))
        budget -= found[-1]
    return found
