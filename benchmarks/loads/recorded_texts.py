"""Requests from recorded loads: a whole file, some of its sessions, or one load followed by another."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from loads.sized_cache import BLOCK_SIZE

from megatron_mamba_cache.planning.plan import BlockText, block_texts
from megatron_mamba_cache.planning.recorded_load import read_load
from megatron_mamba_cache.policy.identifiers import BlockKey


@dataclass(frozen=True, slots=True)
class RecordedPart:
    """Part of a recorded load.

    Args:
        first_sessions, skip_sessions: Number of sessions to use, after skipping `skip_sessions`; None: all.
        then: Another file. If given, the first halves of both files are used, one after the other.
    """

    path: Path
    first_sessions: int | None = None
    skip_sessions: int = 0
    then: Path | None = None

    @property
    def name(self) -> str:
        """Name of the load in tables, without folders."""
        name = self.path.name
        if self.skip_sessions:
            name += f", after session {self.skip_sessions}"
        if self.first_sessions is not None:
            name += f", {self.first_sessions} sessions"
        return name if self.then is None else f"half of {name}, then half of {self.then.name}"


@cache
def texts_of(part: RecordedPart) -> tuple[BlockText, ...]:
    """Return the requests in order of arrival."""
    texts = tuple(block_texts(read_load(part.path, part.first_sessions, part.skip_sessions), BLOCK_SIZE))
    if part.then is None:
        return texts
    then = block_texts(read_load(part.then), BLOCK_SIZE)
    return one_after_the_other(texts[: len(texts) // 2], tuple(then[: len(then) // 2]))


def one_after_the_other(first: tuple[BlockText, ...], second: tuple[BlockText, ...]) -> tuple[BlockText, ...]:
    """Return the requests of both loads as one load. The two loads share no text."""
    highest = max((key for text in first for key in text.keys), default=0)
    moved = [replace(text, keys=[BlockKey(highest + key) for key in text.keys]) for text in second]
    return (*first, *moved)
