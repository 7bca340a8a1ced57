"""Exceptions that this package defines."""

import math


class CacheError(Exception):
    """Base class for the exceptions in this package."""


class CacheCapacityError(CacheError):
    """Raised if an allocation does not fit; the message names the setting to increase."""


class CacheIntegrityError(CacheError):
    """Raised if an invariant of the cache is violated; the message contains the failed equation."""


class GrammarError(ValueError):
    """Raised if a grammar cannot be enforced on a reply; the message contains the reason."""


class HostBudgetError(ValueError):
    """Raised if the host has less memory than the settings reserve for prefixes.

    Args:
        found_gb: Configured size in GiB.
        free_bytes: Available host memory in bytes.
    """

    def __init__(self, found_gb: float, free_bytes: int) -> None:
        super().__init__(
            f"host_cache_gb is {found_gb:g} GiB, but this host has only {free_bytes / 2**30:.3g} GiB available: lower "
            "--host-cache-gb"
        )


class CacheBudgetError(ValueError):
    """Raised if the budget for KV blocks and states cannot hold a request of maximum length.

    Args:
        found_gb, least_gb: Configured budget and minimum sufficient budget in GiB.
        max_sequence_length: Maximum number of tokens per request.
        share: This model's fraction of the budget; a draft model gets the rest.
        num_live: Number of requests whose live states are always allocated; 0 if only running requests have live
            states.
        is_draft: True for a draft model, which can draft only for texts that fit in its part of the budget.
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
        """Return the same error in terms of the whole budget, of which this model has a fraction."""
        found_gb, least_gb = self.found_gb / share, self.least_gb / share
        length, num_live = self.max_sequence_length, self.num_live
        return CacheBudgetError(found_gb, least_gb, length, share, num_live, is_draft=is_draft)
