"""Match a prompt against the cache and other prompts, and plan its admission, without changing the pools."""

import logging
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import nlargest

from ..config import CacheConfig
from .boundaries import BoundaryRule, prefill_chunk_end
from .identifiers import BlockId, BlockKey
from .kv_block_pool import KVBlockPool
from .pools import CachePools
from .requests import RunningRequest
from .slot_pool import SlotPool

_PROMPTS_BEFORE_A_VERDICT = 8

logger = logging.getLogger(__name__)


class HitRateHint:
    """Logs one warning if the settings rule out prefix hits, or if the first prompts are too short for a hit."""

    def __init__(self, config: CacheConfig) -> None:
        self._block_size = config.block_size_tokens
        self._num_short = 0
        self._is_settled = False
        if not config.prefix_caching:
            self._say("prefix caching is switched off (--no-prefix-caching)")
        elif config.block_size_tokens >= config.max_sequence_length:
            self._say(
                f"the block size of {config.block_size_tokens} tokens is not below max_sequence_length="
                f"{config.max_sequence_length}: lower --inference-dynamic-batching-block-size"
            )

    def note_prompt(self, prompt_len: int) -> None:
        """Count a prompt; after the first prompt that is longer than one block, no warning is logged."""
        if self._is_settled:
            return
        if prompt_len > self._block_size:
            self._is_settled = True
            return
        self._num_short += 1
        if self._num_short == _PROMPTS_BEFORE_A_VERDICT:
            self._say(
                f"the first {self._num_short} prompts are no longer than a block of {self._block_size} tokens: lower "
                "--inference-dynamic-batching-block-size"
            )

    def _say(self, reason: str) -> None:
        self._is_settled = True
        logger.warning("no prompt will find a cached prefix: %s", reason)


class Refusal(Enum):
    """Reason why a request is not admitted in this step."""

    TOO_MANY_REQUESTS = "max_requests requests are already running"
    NO_TOKENS = "the step's token budget is used up"
    NO_BLOCKS = "not enough KV blocks"
    NO_SLOT = "no state slot until this step's states are published"
    WAITS_FOR_PREFIX = "another request computes its prefix in this step"
    WAITS_FOR_COPY = "its prefix is being restored from the host"


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest reusable prefix of a prompt.

    Args:
        blocks: All consecutive cached KV blocks from the start of the prompt.
        skip_tokens: Number of leading tokens that need no prefill: up to the last usable boundary with a cached state.
    """

    blocks: tuple[BlockId, ...]
    skip_tokens: int


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """Engine settings for the planning of admissions and prefill chunks.

    Args:
        rounds_at_boundaries: True if prefill rounds states at block boundaries. If chunks are aligned, they then only
            end within a block if a whole step has fewer tokens than the block, and prefill rounds states there, too.
    """

    boundaries: BoundaryRule
    align_prefill_chunks: bool
    rounds_at_boundaries: bool = False

    def chunk_end(self, *, start: int, prompt_len: int, budget: int, follows_prompts: bool = False) -> int:
        """Return the end position of a prefill chunk that starts at `start` and has at most `budget` tokens.

        Args:
            follows_prompts: True if the step computes prompt tokens of other requests. The result may then be `start`:
                the chunk must wait for a step with more tokens left.
        """
        block_size, align = self.boundaries.block_size, self.align_prefill_chunks
        end = prefill_chunk_end(start=start, prompt_len=prompt_len, budget=budget, block_size=block_size, align=align)
        ends_in_block = self.rounds_at_boundaries and align and end < prompt_len and end % block_size != 0
        return start if ends_in_block and follows_prompts else end


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """Plan to admit a request: share `match.blocks`, allocate `num_new_blocks`, prefill up to `chunk_end`."""

    match: PrefixMatch
    num_new_blocks: int
    chunk_end: int


@dataclass(frozen=True, slots=True)
class PromptView:
    """The fields of a request that admission reads."""

    keys: Sequence[BlockKey]
    prompt_len: int
    may_skip: bool = True


def match_prefix(prompt: PromptView, kv: KVBlockPool, slots: SlotPool, block_size: int) -> PrefixMatch:
    """Return the longest reusable prefix. It ends at a cached state, before the prompt's last token."""
    blocks = tuple(kv.longest_match(prompt.keys))
    usable = blocks[: (prompt.prompt_len - 1) // block_size] if prompt.may_skip else ()
    return PrefixMatch(blocks, slots.deepest(usable) * block_size)


def plan_admission(
    prompt: PromptView,
    pools: CachePools,
    *,
    budget: int,
    reserved_keys: Container[BlockKey],
    rules: AdmissionRules,
    follows_prompts: bool = False,
) -> AdmissionPlan | Refusal:
    """Return a plan to admit a request within `budget` tokens, or the reason why it cannot be admitted.

    Args:
        reserved_keys: Keys of the boundaries at which other requests will cache states in this step.
        follows_prompts: As in `AdmissionRules.chunk_end`.
    """
    block_size = rules.boundaries.block_size
    match = match_prefix(prompt, pools.kv, pools.slots, block_size)
    # Waiting one step for another request's state is cheaper than recomputing even one block.
    beyond = prompt.keys[match.skip_tokens // block_size : (prompt.prompt_len - 1) // block_size]
    if prompt.may_skip and any(key in reserved_keys for key in beyond):
        return Refusal.WAITS_FOR_PREFIX
    num_new_blocks = -(-prompt.prompt_len // block_size) - len(match.blocks)
    if not has_room(match, 0, pools, block_size):
        if pools.slots.num_reserved or not pools.slots.num_available_to_run:
            return Refusal.NO_SLOT
        match = PrefixMatch(match.blocks, 0)  # do not reuse the state: the request needs its slot
    if not has_room(match, num_new_blocks, pools, block_size):
        match = PrefixMatch(match.blocks, 0)  # do not reuse the state: the KV blocks may need its memory
        if pools.slots.num_live or not has_room(match, num_new_blocks, pools, block_size):
            return Refusal.NO_BLOCKS
    if budget < 1:
        return Refusal.NO_TOKENS
    start = match.skip_tokens
    end = rules.chunk_end(start=start, prompt_len=prompt.prompt_len, budget=budget, follows_prompts=follows_prompts)
    return AdmissionPlan(match, num_new_blocks, end) if end > start else Refusal.NO_TOKENS


def has_room(match: PrefixMatch, num_new_blocks: int, pools: CachePools, block_size: int) -> bool:
    """Return whether a live slot and the new blocks can be allocated without evicting the matched blocks and state."""
    source = match.blocks[match.skip_tokens // block_size - 1] if match.skip_tokens else None
    slot = None if source is None or pools.slots.is_pinned(source) else pools.slots.slot_of(source)
    kept = pools.kv.unreferenced(match.blocks)
    return pools.fits(num_new_blocks, 0, kept, () if slot is None else (slot,))


BRANCH_WINDOW = 32
"""Maximum number of queued prompts that are compared with the prompt before them to find branch points."""
MOST_BRANCH_POINTS = 4
"""Maximum number of states that one prompt caches for waiting requests, in addition to its own states."""


def branch_points(prompt: PromptView, others: Iterable[PromptView], block_size: int) -> tuple[int, ...]:
    """Return the `MOST_BRANCH_POINTS` block boundaries, or fewer, at which most other prompts diverge; ascending."""
    num_sharing: Counter[int] = Counter()
    for other in others:
        num_shared = num_common(prompt.keys, other.keys) if other.may_skip else 0
        if num_blocks := min(num_shared, (other.prompt_len - 1) // block_size):
            num_sharing[num_blocks * block_size] += 1
    most_shared = nlargest(MOST_BRANCH_POINTS, num_sharing, key=lambda position: (num_sharing[position], position))
    return tuple(sorted(most_shared))


def num_common(keys: Sequence[BlockKey], others: Sequence[BlockKey]) -> int:
    """Return the number of leading blocks that two prompts share. Keys are chained: equal keys imply equal prefixes."""
    low, high = 0, min(len(keys), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


REASONS = ("caching_off", "prompt_log_probs", "short_prompt", "copy_failed", "new_prefix", "no_state")


def reason_for_no_hit(request: RunningRequest, block_size: int, *, enabled: bool, awaited_copy: bool) -> str | None:
    """Return why a newly admitted request prefills from its first token, one of `REASONS`; None on a hit.

    "copy_failed": the copy from a lower tier failed, or the copied prefix was evicted before admission. "new_prefix":
    the first block is not cached. "no_state": leading blocks are cached, but none of them ends in a cached state.
    """
    if request.computed:
        return None
    if not enabled:
        return "caching_off"
    if not request.spec.may_skip:
        return "prompt_log_probs"
    if request.spec.prompt_len <= block_size:
        return "short_prompt"
    if awaited_copy:
        return "copy_failed"
    return "no_state" if request.num_shared_blocks else "new_prefix"
