"""Token counts of HTTP requests."""

from dataclasses import dataclass
from typing import Any

from ..policy.request_settings import RequestSpec
from .backend import Progress

_HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an HTTP request.

    Args:
        cached_tokens: Prompt tokens that were skipped, by each prompt's first choice.
        cached_tokens_from_host, cached_tokens_from_disk: Of these, those that came back for it from there.
        written_tokens: Others that it has newly written to the cache.
        hour_tokens: Those of them that are before a breakpoint that is kept for an hour.
        draft_tokens, accepted_tokens: Drafts verified for all choices, and those accepted.
        reasoning_tokens: Completion tokens that were parsed as reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    reasoning_tokens: int = 0
    written_tokens: int = 0
    hour_tokens: int = 0
    cached_tokens_from_host: int = 0
    cached_tokens_from_disk: int = 0

    @property
    def by_tier(self) -> dict[str, int]:
        """The cached tokens that came back from each tier below the device; an extension of every API's usage."""
        return {
            "cached_tokens_from_host": self.cached_tokens_from_host,
            "cached_tokens_from_disk": self.cached_tokens_from_disk,
        }

    def body(self) -> dict[str, Any]:
        """Return OpenAI's usage object, with `draft_tokens` and the tiers as extensions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": self.written_tokens,
                **self.by_tier,
            },
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.draft_tokens - self.accepted_tokens,
                "draft_tokens": self.draft_tokens,
            },
        }


@dataclass(frozen=True, slots=True)
class PromptUsage:
    """What a prompt took from the cache and gave to it; see `Usage`."""

    cached_tokens: int
    cached_tokens_from_host: int
    cached_tokens_from_disk: int
    written_tokens: int
    hour_tokens: int


def prompt_usage(spec: RequestSpec, latest: Progress) -> PromptUsage:
    """Return the counts of a request's prompt, each token counted once however often it was computed."""
    written = min(latest.written_tokens, spec.prompt_len - latest.cached_tokens)
    ends = [place.position for place in spec.breakpoints if place.keep_s >= _HOUR_S]
    of_hour = max(max(ends, default=0) - latest.cached_tokens, 0)
    return PromptUsage(
        cached_tokens=latest.cached_tokens,
        cached_tokens_from_host=latest.cached_tokens_from_host,
        cached_tokens_from_disk=latest.cached_tokens_from_disk,
        written_tokens=written,
        hour_tokens=min(of_hour, written),
    )
