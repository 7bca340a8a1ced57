"""The errors that this package defines."""

import math


class CacheError(Exception):
    """Base of the package's own errors."""


class CacheCapacityError(CacheError):
    """There is not enough room for an allocation; the message names the setting to raise."""


class CacheIntegrityError(CacheError):
    """An invariant of the cache does not hold; the message gives the equation that failed."""


class GrammarError(ValueError):
    """A grammar cannot be enforced on a reply; the message says why."""


class HostBudgetError(ValueError):
    """The host does not have the memory that prefixes may take.

    Args:
        found_gb: GiB that the settings say.
        free_bytes: What the host could give.
    """

    def __init__(self, found_gb: float, free_bytes: int) -> None:
        super().__init__(
            f"host_cache_gb is {found_gb:g} GiB, but this host has only {free_bytes / 2**30:.3g} GiB available: lower "
            "--host-cache-gb"
        )


class CacheBudgetError(ValueError):
    """One budget for KV blocks and states cannot hold a request of the longest sequence.

    Args:
        found_gb, least_gb: GiB of the budget, and the least that is enough.
        max_sequence_length: Tokens of that request.
        share: This model's share of the budget; a draft model has the rest.
        num_live: Requests whose live states are always allocated; 0: only those that run.
        is_draft: True if it is about a draft model, which drafts for texts as long as its part has room for.
    """

    def __init__(
        self,
        found_gb: float,
        least_gb: float,
        max_sequence_length: int,
        share: float = 1.0,
        num_live: int = 0,
        *,
        is_draft: bool = False,
    ) -> None:
        self.found_gb = found_gb
        self.least_gb = least_gb
        self.max_sequence_length = max_sequence_length
        self.num_live = num_live
        part = "" if share == 1 else f", of which this model has {share:.0%}"
        live = f" next to the live states of max_requests={num_live}" if num_live else ""
        ending = f", or lower --max-model-len{' or max_requests' if num_live else ''}"
        if is_draft:
            ending = "; it drafts only for texts that fit in its part"
        super().__init__(
            f"cache_gb is {found_gb:g} GiB{part}, which cannot hold one request of max_sequence_length="
            f"{max_sequence_length} tokens with its states{live}: set --cache-gb to "
            f"{math.ceil(least_gb * 1e6) / 1e6:f} or more{ending}"
        )

    def of_whole(self, share: float, *, is_draft: bool = False) -> "CacheBudgetError":
        """Return the error about the whole budget, of which this model has a share."""
        found_gb, least_gb = self.found_gb / share, self.least_gb / share
        length, num_live = self.max_sequence_length, self.num_live
        return CacheBudgetError(found_gb, least_gb, length, share, num_live, is_draft=is_draft)
