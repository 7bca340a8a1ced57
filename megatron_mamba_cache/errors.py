"""Exceptions that this package defines."""

import math


class CacheError(Exception):
    """Base class of this package's runtime errors."""


class CacheCapacityError(CacheError):
    """Raised if memory cannot be allocated; the message names the setting to change."""


class CacheIntegrityError(CacheError):
    """Raised if an invariant of the cache is violated; the message says which."""


class GrammarError(ValueError):
    """Raised if a grammar cannot be enforced on a reply; the message says why."""


class HostBudgetError(ValueError):
    """Raised if `host_cache_gb` exceeds the host's available memory.

    Args:
        found_gb: Value of `host_cache_gb`.
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
        share: Fraction of the budget that this model gets; below 1 if a draft model shares the budget.
        num_live: Number of requests whose live states are allocated in advance; 0 if live states are allocated when a
            request is admitted.
        is_draft: True if this model is the draft model, which drafts only for requests that fit in its part.
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
        part = "" if share == 1 else f" ({share:.0%} of it for this model)"
        live = f" in addition to the live states of max_requests={num_live} requests" if num_live else ""
        ending = f", or lower --max-model-len{' or max_requests' if num_live else ''}"
        if is_draft:
            ending = "; the draft model drafts only for requests that fit in its part"
        super().__init__(
            f"cache_gb is {found_gb:g} GiB{part}, which cannot hold one request of max_sequence_length="
            f"{max_sequence_length} tokens and its states{live}: set --cache-gb to "
            f"{math.ceil(least_gb * 1e6) / 1e6:f} or more{ending}"
        )

    def of_whole(self, share: float, *, is_draft: bool = False) -> "CacheBudgetError":
        """Return this error for the budget of both models, of which this model gets the fraction `share`."""
        found_gb, least_gb = self.found_gb / share, self.least_gb / share
        length, num_live = self.max_sequence_length, self.num_live
        return CacheBudgetError(found_gb, least_gb, length, share, num_live, is_draft=is_draft)
