"""Log-probs and ranks of prompt tokens in the form of vLLM's `prompt_logprobs`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..policy.request_settings import ScoredToken
from .errors import bad_request

_MOST_ENTRIES = 2**18  # of one response: some 20 MB
_LEAST_LOG_PROB = -9999.0  # instead of minus infinity, which JSON lacks

Entries = list[dict[str, dict[str, Any]] | None]


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Scores of prompt tokens that a request asks for."""

    top_n: int  # best tokens for each position, in addition to the prompt's own
    text_of: Callable[[int], str]  # returns the text of a token, special or not

    def check(self, lengths: Sequence[int]) -> None:
        """Raise `ApiError` 400 if prompts of these lengths have too many tokens."""
        num_entries = sum(length - 1 for length in lengths) * (1 + self.top_n)
        if num_entries > _MOST_ENTRIES:
            raise bad_request(
                f"prompt_logprobs={self.top_n} makes {num_entries} entries for these prompts; at most {_MOST_ENTRIES} "
                "are returned: send shorter prompts or a smaller prompt_logprobs",
                "prompt_logprobs",
            )

    def entries(self, token_ids: Sequence[int], scores: Sequence[ScoredToken]) -> Entries:
        """Return each prompt token with its alternatives, by id; None for the first, which has no score."""
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
    """Yield id, log-prob and rank of a token and of its alternatives."""
    yield token_id, finite(score.log_prob), score.rank
    for rank, (other_id, log_prob) in enumerate(zip(score.best_ids, score.best_log_probs, strict=True), 1):
        if other_id != token_id:
            yield other_id, finite(log_prob), rank


def finite(log_prob: float) -> float:
    """Return a log-prob that JSON can hold."""
    return log_prob if log_prob > _LEAST_LOG_PROB else _LEAST_LOG_PROB
