"""Progress of a request's choices that has not been read yet."""

import asyncio

from .backend import Progress


class Mail:
    """A queue that merges the waiting progress of each choice, so that a slow reader catches up at once."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Progress]] = {}
        self._has_some = asyncio.Event()

    def put(self, index: int, progress: Progress) -> None:
        """Add a step's progress of a choice."""
        self._waiting.setdefault(index, []).append(progress)
        self._has_some.set()

    async def take(self) -> tuple[int, Progress]:
        """Return the choice that has waited longest, and all of its waiting progress."""
        await self._has_some.wait()
        index = next(iter(self._waiting))
        progress = _joined(self._waiting.pop(index))
        if not self._waiting:
            self._has_some.clear()
        return index, progress


def _joined(parts: list[Progress]) -> Progress:
    last = parts[-1]
    return Progress(
        tokens=tuple(token for part in parts for token in part.tokens),
        log_probs=tuple(value for part in parts for value in part.log_probs),
        alternatives=tuple(best for part in parts for best in part.alternatives),
        prompt_log_probs=parts[0].prompt_log_probs,
        prompt_alternatives=parts[0].prompt_alternatives,
        prompt_scores=parts[0].prompt_scores,
        cached_tokens=last.cached_tokens,
        cached_tokens_from_host=last.cached_tokens_from_host,
        cached_tokens_from_disk=last.cached_tokens_from_disk,
        written_tokens=last.written_tokens,
        draft_tokens=last.draft_tokens,
        accepted_tokens=last.accepted_tokens,
        running_s=last.running_s,
        end=last.end,
        error=last.error,
    )
