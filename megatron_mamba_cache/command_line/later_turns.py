"""How much of the later turns of sessions was skipped; a first turn has no earlier one to share a prefix with."""

from collections.abc import Sequence
from dataclasses import dataclass

from .prompts import PromptLine
from .results import RequestRecord


@dataclass(frozen=True, slots=True)
class LaterTurns:
    """Prompt tokens of the turns that ran after the first of their session, and how many of them were skipped."""

    prompt_tokens: int
    cached_tokens: int

    @staticmethod
    def of(lines: Sequence[PromptLine], records: Sequence[RequestRecord]) -> "LaterTurns":
        """Sum over the lines that have an earlier one of their session; `records` are theirs, in the same order."""
        seen: set[str | int] = set()
        prompt_tokens = cached_tokens = 0
        for line, record in zip(lines, records, strict=True):
            if line.session in seen and record.error is None:
                prompt_tokens += len(record.prompt_tokens)
                cached_tokens += record.cached_tokens
            if line.session is not None:
                seen.add(line.session)
        return LaterTurns(prompt_tokens, cached_tokens)

    def __str__(self) -> str:
        share = 100 * self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        return (
            f"from the second turn of a session on: skipped {self.cached_tokens} of {self.prompt_tokens} prompt tokens "
            f"({share:.1f} %)"
        )

    def as_dict(self) -> dict[str, object]:
        """Return plain JSON types."""
        return {"later_turns": {"prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens}}
