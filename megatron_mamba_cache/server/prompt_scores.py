"""Log-probs and ranks of prompt tokens in the format of vLLM's `prompt_logprobs`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..policy.request_settings import ScoredToken
from .errors import bad_request

_MOST_ENTRIES = 2**18  # limit for one response, about 20 MB of JSON
_LEAST_LOG_PROB = -9999.0  # replaces minus infinity, which JSON cannot represent

Entries = list[dict[str, dict[str, Any]] | None]


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Settings for the prompt log-probs in a response."""

    top_n: int  # number of top tokens at each position, in addition to the prompt's token
    text_of: Callable[[int], str]  # returns a token's text, also for special tokens

    def check(self, lengths: Sequence[int]) -> None:
        """Raise `ApiError` 400 if the response for prompts of these lengths would be too large."""
        num_entries = sum(length - 1 for length in lengths) * (1 + self.top_n)
        if num_entries > _MOST_ENTRIES:
            raise bad_request(
                f"prompt_logprobs={self.top_n} requests {num_entries} entries, and at most {_MOST_ENTRIES} "
                "are allowed; send shorter prompts or a smaller prompt_logprobs",
                "prompt_logprobs",
            )

    def entries(self, token_ids: Sequence[int], scores: Sequence[ScoredToken]) -> Entries:
        """Return one entry per prompt token: log-probs of it and of the top-n tokens, by id; None for the first."""
        texts: dict[int, str] = {}
        found: Entries = [None]
        for token_id, score in zip(token_ids[1:], scores, strict=True):
            named = {}
            for other_id, log_prob, rank in _ranked(token_id, score):
                if other_id not in texts:
                    texts[other_id] = self.text_of(other_id)
                named[str(other_id)] = {"logprob": log_prob, "rank": rank, "decoded_token": texts[other_id]}
            found.append(named)
        return found


def _ranked(token_id: int, score: ScoredToken) -> Iterator[tuple[int, float, int]]:
    """Yield (id, log-prob, rank) for a prompt token, then for each top-n token at its position."""
    yield token_id, finite(score.log_prob), score.rank
    for rank, (other_id, log_prob) in enumerate(zip(score.best_ids, score.best_log_probs, strict=True), 1):
        if other_id != token_id:
            yield other_id, finite(log_prob), rank


def finite(log_prob: float) -> float:
    """Clamp a log-prob to a finite minimum, because JSON cannot represent minus infinity."""
    return log_prob if log_prob > _LEAST_LOG_PROB else _LEAST_LOG_PROB
