"""Prompt lookup: a drafter that finds an earlier occurrence of the last tokens and proposes the tokens after it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..policy.requests import RunningRequest
from .drafter import Draft, Drafter, DraftRequest

_HASH_BITS = 32
_HASH_MASK = (1 << _HASH_BITS) - 1
_MIX = 0x9E3779B1
_SMALLEST_CAPACITY = 256
_FEW_TOKENS = 64
_NOWHERE = -1


class SuffixIndex:
    """N-gram index of a growing text that finds earlier occurrences of its last tokens, with hash chains as in LZ77.

    `_newest` maps the hash of an n-gram to the last position with this hash, and `_previous` maps each position to the
    previous one. A chain therefore visits occurrences from the most recent to the oldest; comparing tokens rules out
    hash collisions. The index takes 12 to 20 bytes per token.

    Args:
        min_match: Minimum length of a match in tokens, and length of the n-grams.
        max_match: Maximum length of a match in tokens.
        max_candidates: Maximum number of earlier occurrences to compare, most recent first.
        length: Number of tokens that the text will have soon, for which memory is reserved.
    """

    def __init__(self, min_match: int, max_match: int, max_candidates: int, length: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._max_candidates = max_candidates
        self._length = 0
        self._text: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._reserve(max(_SMALLEST_CAPACITY, length + length // 4))

    def __len__(self) -> int:
        return self._length

    def last_tokens(self, count: int) -> list[int]:
        """Return the last `count` tokens, or all tokens if there are fewer."""
        tokens: list[int] = self._text_view[max(0, self._length - count) : self._length].tolist()
        return tokens

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Append tokens, [n] in [0, 2**31), to the text; takes amortized constant time per token."""
        start, end = self._length, self._length + len(tokens)
        must_grow = end > len(self._text)
        if must_grow:
            self._reserve(end + end // 4)
        if end - start == 1:  # several times faster than the assignment of a slice
            self._text_view[start] = int(tokens[0])
        else:
            self._text[start:end] = tokens
        self._length = end
        first = self._min_match - 1  # first position at which an n-gram ends
        self._file(first if must_grow else max(first, start), end)

    def continuation(self, num_tokens: int) -> tuple[int, ...]:
        """Return `num_tokens` tokens that follow the longest earlier match of the text's end; empty without a match.

        Among matches of equal length, the most recent is used. If fewer tokens follow the match, they are repeated, so
        that a repetition in the text continues.
        """
        start = self._match_end()
        if start == 0:
            return ()
        followed: list[int] = self._text_view[start : min(start + num_tokens, self._length)].tolist()
        num_copies = -(-num_tokens // len(followed))
        return tuple((followed * num_copies)[:num_tokens])

    def _reserve(self, capacity: int) -> None:
        """Reallocate the buffers for `capacity` tokens. The text is kept, but the index becomes empty."""
        text = np.empty(capacity, dtype=np.int32)
        text[: self._length] = self._text[: self._length]
        self._text = text
        self._previous = np.empty(capacity, dtype=np.int32)
        num_bits = capacity.bit_length()
        self._newest = np.full(1 << num_bits, _NOWHERE, dtype=np.int32)
        self._shift = _HASH_BITS - num_bits
        # Reading one element from a memoryview is several times faster than from a NumPy array.
        self._text_view = self._text.data
        self._previous_view = self._previous.data
        self._newest_view = self._newest.data

    def _file(self, start: int, end: int) -> None:
        """Add the positions in [`start`, `end`) to the index, in order."""
        if end - start > _FEW_TOKENS:
            self._file_many(start, end)
            return
        shift, previous, newest = self._shift, self._previous_view, self._newest_view
        text, codes = self._text_view[start + 1 - self._min_match : end].tolist(), [0] * (end - start)
        for offset in range(self._min_match):  # as in `_hash_grams`
            codes = [code * _MIX + token + 1 for code, token in zip(codes, text[offset:], strict=False)]
        for position, code in enumerate(codes, start):
            bucket = (code * _MIX & _HASH_MASK) >> shift
            previous[position] = newest[bucket]
            newest[bucket] = position

    def _file_many(self, start: int, end: int) -> None:
        text = self._text[start + 1 - self._min_match : end].astype(np.uint64)
        grams = (text[offset : offset + end - start] for offset in range(self._min_match))
        # Pack hash and position into one integer, because sort is several times faster than argsort.
        pairs = _hash_grams(grams, self._shift) << 32 | np.arange(start, end, dtype=np.uint64)
        pairs.sort()
        buckets, positions = (pairs >> 32).astype(np.int64), (pairs & 0xFFFFFFFF).astype(np.int64)
        is_first = np.concatenate(([True], buckets[1:] != buckets[:-1]))
        is_last = np.concatenate((is_first[1:], [True]))
        before = np.concatenate(([_NOWHERE], positions[:-1]))
        self._previous[positions] = np.where(is_first, self._newest[buckets], before)
        self._newest[buckets[is_last]] = positions[is_last]

    def _match_end(self) -> int:
        """Return the position after the longest earlier match of the text's end; 0 if there is none."""
        best_end, best_len = 0, self._min_match - 1
        if self._length <= best_len:
            return 0
        text, previous = self._text_view, self._previous_view
        suffix: list[int] = text[max(0, self._length - self._max_match) : self._length].tolist()
        suffix.reverse()
        position = previous[self._length - 1]  # the most recent position at which the last n-gram may have ended
        for _ in range(self._max_candidates):
            if position == _NOWHERE or best_len == len(suffix):
                break
            if position >= best_len and text[position - best_len] == suffix[best_len]:
                match_len = self._match_len(position, suffix)
                if match_len > best_len:
                    best_end, best_len = position + 1, match_len
            position = previous[position]
        return best_end

    def _match_len(self, position: int, suffix: list[int]) -> int:
        """Return the length of the match that ends at `position`; `suffix` is the text's end in reverse."""
        longest = min(len(suffix), position + 1)
        tokens: list[int] = self._text_view[position + 1 - longest : position + 1].tolist()
        tokens.reverse()
        if tokens == suffix[:longest]:
            return longest
        return next(number for number, (one, other) in enumerate(zip(tokens, suffix, strict=False)) if one != other)


def _hash_grams(grams: Iterable[npt.NDArray[np.uint64]], shift: int) -> npt.NDArray[np.uint64]:
    """Return the hashes, of _HASH_BITS - `shift` bits, of n-grams, given token 0, token 1, ... of each n-gram."""
    code = np.zeros(1, np.uint64)
    for tokens in grams:
        code = code * np.uint64(_MIX) + tokens + np.uint64(1)
    return (code * np.uint64(_MIX) & np.uint64(_HASH_MASK)) >> np.uint64(shift)


_NUM_CHECKED = 8
_MOST_INDEXED = 1 << 14
"""Maximum number of tokens of a request that are indexed at once, which takes about a millisecond."""


class PromptLookupDrafter:
    """Drafter that proposes the tokens after the longest earlier occurrence of a request's last tokens.

    It needs no model. It helps when the output repeats the prompt or itself, as in edits, quotes, code and lists.

    Args:
        min_match: Minimum number of last tokens that must occur earlier.
        max_match: Maximum number of last tokens to compare; the most recent of the longest matches is used.
        max_candidates: Maximum number of earlier occurrences to compare, most recent first.

    Raises:
        ValueError: Unless 1 <= min_match <= max_match and 1 <= max_candidates.
    """

    def __init__(self, min_match: int = 2, max_match: int = 32, max_candidates: int = 16) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(
                f"min_match must be between 1 and max_match, found min_match={min_match} and max_match={max_match}"
            )
        if max_candidates < 1:
            raise ValueError(f"max_candidates must be at least 1, found {max_candidates}")
        self._min_match = min_match
        self._max_match = max_match
        self._max_candidates = max_candidates
        self._indices: dict[int, SuffixIndex] = {}
        self._indexed: dict[int, RunningRequest] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return a draft for each request; a draft is empty if the request's last tokens do not occur earlier.

        The first calls for a long prompt only index a part of it each, and return empty drafts.
        """
        return [Draft(self._continuation(request)) for request in requests]

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return 0, because a lookup takes negligible time compared with a step."""
        return 0.0

    def forget(self, request_id: int) -> None:
        """Free the index of a request; do nothing for an unknown request."""
        self._indices.pop(request_id, None)
        self._indexed.pop(request_id, None)

    def _continuation(self, request: DraftRequest) -> tuple[int, ...]:
        """Return draft tokens; rebuild the index of a request that has another text than before."""
        running, length = request.running, request.running.length
        request_id = running.request_id
        index = self._indices.get(request_id)
        if index is None or (self._indexed[request_id] is not running and not _continues(index, running)):
            index = SuffixIndex(self._min_match, self._max_match, self._max_candidates, length)
            self._indices[request_id] = index
        self._indexed[request_id], known = running, len(index)
        if known < length:
            index.extend(running.tokens(known, min(length, known + _MOST_INDEXED)))
        return index.continuation(request.num_tokens) if length <= known + _MOST_INDEXED else ()


def _continues(index: SuffixIndex, request: RunningRequest) -> bool:
    """Return True if the request's text starts with the indexed text; only the last indexed tokens are compared."""
    last = index.last_tokens(_NUM_CHECKED)
    return list(request.tokens(len(index) - len(last), len(index))) == last


@dataclass(frozen=True, slots=True)
class AutoDrafter:
    """A drafter that takes time, and prompt lookup alongside it: each request of a step uses one of them, or none.

    The choice is made for the highest expected throughput. It needs `CacheConfig(adaptive_drafts=True)`; otherwise, the
    drafter is used alone.
    """

    drafter: Drafter
