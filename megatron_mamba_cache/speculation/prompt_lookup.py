"""A drafter that copies the text after an earlier occurrence of the newest tokens."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..policy.requests import RunningRequest
from .drafter import Draft, DraftRequest

_UINT64_MASK = (1 << 64) - 1
_MIX = 0x9E3779B97F4A7C15
_SMALLEST_CAPACITY = 256
_FEW_TOKENS = 16
_NOWHERE = -1


class SuffixIndex:
    """An n-gram index of a growing text that finds earlier occurrences of its end, with chains as in LZ77.

    `newest` holds the last position of each hash of an n-gram, `previous` the position before each. So a chain visits
    occurrences from the most recent on; comparing tokens rules out collisions. Memory: 12 to 20 bytes a token.

    Args:
        min_match: The fewest tokens of a match; the length of the n-grams.
        max_match: The most tokens of a match that are compared.
        max_candidates: The most occurrences that are compared, most recent first.
    """

    def __init__(self, min_match: int, max_match: int, max_candidates: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._max_candidates = max_candidates
        self._length = 0
        self._text: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._reserve(_SMALLEST_CAPACITY)

    def __len__(self) -> int:
        return self._length

    def last_tokens(self, count: int) -> list[int]:
        """Return the last `count` tokens, or all there are."""
        tokens: list[int] = self._text[max(0, self._length - count) : self._length].tolist()
        return tokens

    def extend(self, tokens: npt.ArrayLike) -> None:
        """Append tokens [n] in [0, 2**31) to the text; amortised constant time a token."""
        added = np.asarray(tokens, dtype=np.int32)
        start, end = self._length, self._length + len(added)
        must_grow = end > len(self._text)
        if must_grow:
            self._reserve(end + end // 4)
        self._text[start:end] = added
        self._length = end
        first = self._min_match - 1  # the first position where an n-gram ends
        self._file(first if must_grow else max(first, start), end)

    def continuation(self, num_tokens: int) -> tuple[int, ...]:
        """Return the `num_tokens` tokens after the longest earlier match of the text's end; empty without a match.

        The most recent match wins among equals. Text that reaches the end is repeated, so that a repetition continues.
        """
        start = self._match_end()
        if start == 0:
            return ()
        followed: list[int] = self._text[start : min(start + num_tokens, self._length)].tolist()
        num_copies = -(-num_tokens // len(followed))
        return tuple((followed * num_copies)[:num_tokens])

    def _reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens and forget what is filed; the text stays."""
        text = np.empty(capacity, dtype=np.int32)
        text[: self._length] = self._text[: self._length]
        self._text = text
        self._previous = np.empty(capacity, dtype=np.int32)
        num_bits = capacity.bit_length()
        self._newest = np.full(1 << num_bits, _NOWHERE, dtype=np.int32)
        self._shift = 64 - num_bits
        # A memoryview reads a single number several times faster than an array does.
        self._text_view = self._text.data
        self._previous_view = self._previous.data
        self._newest_view = self._newest.data

    def _file(self, start: int, end: int) -> None:
        """File the positions from `start` to `end`, exclusive, in order; none is filed yet."""
        if end - start > _FEW_TOKENS:
            self._file_many(start, end)
            return
        for position in range(start, end):
            gram = self._text_view[position + 1 - self._min_match : position + 1]
            bucket = _hash_grams(gram, self._shift)
            self._previous_view[position] = self._newest_view[bucket]
            self._newest_view[bucket] = position

    def _file_many(self, start: int, end: int) -> None:
        text = self._text[start + 1 - self._min_match : end].astype(np.uint64)
        grams = (text[offset : offset + end - start] for offset in range(self._min_match))
        # Both numbers in one integer, because sorting values is several times faster than argsort.
        pairs = _hash_grams(grams, self._shift) << 32 | np.arange(start, end, dtype=np.uint64)
        pairs.sort()
        buckets, positions = (pairs >> 32).astype(np.int64), (pairs & 0xFFFFFFFF).astype(np.int64)
        is_first = np.concatenate(([True], buckets[1:] != buckets[:-1]))
        is_last = np.concatenate((is_first[1:], [True]))
        before = np.concatenate(([_NOWHERE], positions[:-1]))
        self._previous[positions] = np.where(is_first, self._newest[buckets], before)
        self._newest[buckets[is_last]] = positions[is_last]

    def _match_end(self) -> int:
        """Return the position after the longest earlier match of the text's end, 0 if there is none."""
        suffix: list[int] = self._text[max(0, self._length - self._max_match) : self._length].tolist()
        suffix.reverse()
        best_end, best_len = 0, self._min_match - 1
        for position in self._candidates():
            match_len = self._match_len(position, suffix, best_len)
            if match_len > best_len:
                best_end, best_len = position + 1, match_len
        return best_end

    def _match_len(self, position: int, suffix: list[int], to_beat: int) -> int:
        """Return how much of `suffix`, last token first, ends at `position`; 0 if it cannot exceed `to_beat`."""
        text, longest = self._text_view, min(len(suffix), position + 1)
        if longest <= to_beat or text[position - to_beat] != suffix[to_beat]:
            return 0
        match_len = 0
        while match_len < longest and text[position - match_len] == suffix[match_len]:
            match_len += 1
        return match_len

    def _candidates(self) -> Iterator[int]:
        """Yield where the text's last n-gram may have ended before, most recent first."""
        if self._length < self._min_match:
            return
        position = self._previous_view[self._length - 1]
        for _ in range(self._max_candidates):
            if position == _NOWHERE:
                return
            yield position
            position = self._previous_view[position]


def _hash_grams(grams: Iterable[Any], shift: int) -> Any:
    """Hash n-grams to 64 - `shift` bits; `grams` yields first tokens, then second ...: integers or uint64 arrays."""
    code: Any = 0
    for tokens in grams:
        code = (code * _MIX + tokens + 1) & _UINT64_MASK
    return ((code * _MIX) & _UINT64_MASK) >> shift


_NUM_CHECKED = 8


class PromptLookupDrafter:
    """Draft the tokens that followed the longest earlier occurrence of a request's last tokens.

    It needs no model, and pays where the output repeats its prompt or itself: edits, quotes, code, lists.

    Args:
        min_match: The fewest last tokens that must have occurred before.
        max_match: The most that are compared; the most recent occurrence wins among equals.
        max_candidates: Earlier occurrences that are compared, the most recent ones.

    Raises:
        ValueError: Unless 1 <= min_match <= max_match and 1 <= max_candidates.
    """

    def __init__(self, min_match: int = 2, max_match: int = 32, max_candidates: int = 16) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"need 1 <= min_match <= max_match, found min_match {min_match}, max_match {max_match}")
        if max_candidates < 1:
            raise ValueError(f"max_candidates must be at least 1, found {max_candidates}")
        self._min_match = min_match
        self._max_match = max_match
        self._max_candidates = max_candidates
        self._indices: dict[int, SuffixIndex] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the copied draft of each request, empty if the newest tokens did not occur before."""
        return [Draft(self._current_index(request.running).continuation(request.num_tokens)) for request in requests]

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return 0: negligible next to a step."""
        return 0.0

    def forget(self, request_id: int) -> None:
        """Free the index of a request; ignore an unknown one."""
        self._indices.pop(request_id, None)

    def _current_index(self, request: RunningRequest) -> SuffixIndex:
        """Return the up-to-date index of a request's text; a different text gets a new index."""
        index = self._indices.get(request.request_id)
        if index is None or not _continues(index, request):
            index = SuffixIndex(self._min_match, self._max_match, self._max_candidates)
            self._indices[request.request_id] = index
        if len(index) < request.length:
            index.extend(request.tokens(len(index), request.length))
        return index


def _continues(index: SuffixIndex, request: RunningRequest) -> bool:
    """Return True if a request's text begins with the index's text, judged by its last tokens."""
    last = index.last_tokens(_NUM_CHECKED)
    return list(request.tokens(len(index) - len(last), len(index))) == last
