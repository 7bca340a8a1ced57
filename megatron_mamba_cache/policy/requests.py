"""Waiting and running requests, with the fields that the prefix cache uses."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from .block_hashing import BlockKeyChain, KeyChain
from .identifiers import BlockId, DraftBufferId, SlotId
from .kept_tokens import KeptTokens, TokenRoutes
from .request_settings import RequestSpec, ScoredToken


@dataclass(slots=True, eq=False)
class Candidate:
    """Request that waits for admission, with its prompt's block keys, which are computed once per epoch.

    Args:
        age: Sequence number of the first admission; None if the request has never run.
    """

    spec: RequestSpec
    age: int | None = None
    chain: KeyChain = field(default_factory=lambda: BlockKeyChain(bytes(32), 1))
    epoch: int = -1  # until the keys are computed
    awaited_copy: bool = False  # True if it has waited for a copy of its prefix in this epoch

    @property
    def request_id(self) -> int:
        """Id of the request."""
        return self.spec.request_id

    def begin_epoch(self, chain: KeyChain, epoch: int) -> None:
        """Set the key chain for a new epoch, and reset `awaited_copy`."""
        self.chain, self.epoch, self.awaited_copy = chain, epoch, False

    def forget_keys(self) -> None:
        """Mark the keys as outdated, so that they are computed again."""
        self.epoch = -1

    def restart(self, age: int | None, generated: Sequence[int]) -> None:
        """Queue the request again after an interruption, with the tokens that it has generated."""
        self.spec, self.age = self.spec.continued(generated), age
        self.forget_keys()


@dataclass(frozen=True, slots=True)
class ReservedState:
    """Slot reserved for the state at a boundary. The next step writes it; no request can reuse it until published."""

    position: int  # token position of the boundary
    slot: SlotId


@dataclass(slots=True, eq=False)
class StateCursor:
    """Location of a request's live state and of the states after its drafts; changed only by `DraftStates`.

    With draft slots, the live state is in column `accepted` - 1 of the request's draft window; column 0 is the live
    slot, which also holds the tensors that all columns share. With a draft buffer, the live slot holds the state after
    the first `num_folded` tokens, and the buffer holds the inputs of later tokens.

    Args:
        draft_buffer: Index of the request's draft buffer; None if it uses draft slots.
        draft_slots: Columns 1, 2, ... of the draft window.
        accepted: Number of tokens that the last step kept.
        resolved: Number of tokens in the live slot's state when `resolve` was last called; 0 if it never was.
    """

    live_slot: SlotId
    draft_buffer: DraftBufferId | None = None
    draft_slots: list[SlotId] = field(default_factory=list)
    accepted: int = 1
    resolved: int = 0

    @property
    def state_slot(self) -> SlotId:
        """Slot of the live state, in the last accepted column."""
        return self.draft_slots[self.accepted - 2] if self.draft_slots and self.accepted > 1 else self.live_slot

    def accept(self, num_tokens: int) -> None:
        """Advance to the state after the last step's first `num_tokens` tokens."""
        self.accepted = num_tokens

    def add_slots(self, slots: list[SlotId]) -> None:
        """Append columns to the draft window."""
        self.draft_slots += slots

    def remove_last_slot(self) -> None:
        """Remove the last column of the draft window."""
        del self.draft_slots[-1]

    def resolve(self, num_tokens: int) -> None:
        """Record that the live slot now holds the state after all `num_tokens` computed tokens."""
        self.accepted, self.resolved = 1, num_tokens

    def release_buffer(self) -> None:
        """Forget the draft buffer, which the caller frees."""
        self.draft_buffer = None


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that holds KV blocks and a live state.

    The first `computed` tokens have KV and are included in the live state. The next step computes `scheduled` more
    tokens, of which the last are `drafts`. The token at position `computed` is the next input.

    Only a request's methods change its fields, except `cursor`. `PrefixCache` makes the same change to the pools.
    """

    spec: RequestSpec
    chain: KeyChain
    epoch: int
    age: int  # sequence number of the first admission; the youngest request is preempted first
    cursor: StateCursor
    block_ids: list[BlockId]
    num_shared_blocks: int  # number of leading blocks that were found in the cache, which are never written
    computed: int
    scheduled: int = 0
    generated: list[int] = field(default_factory=list)
    num_published_blocks: int = 0
    source_block: BlockId | None = None  # block with the pinned state from which the next step starts
    source_slot: SlotId | None = None
    reserved: list[ReservedState] = field(default_factory=list)
    is_paused: bool = False
    drafts: tuple[int, ...] = ()
    branches: tuple[int, ...] = ()  # boundaries of the prompt at which waiting requests diverged
    checkpoint: BlockId | None = None  # block of the newest decode checkpoint
    from_host: int = 0  # number of prompt tokens skipped because they were restored from host memory
    from_disk: int = 0  # number of prompt tokens skipped because they were restored from disk
    num_written: int = 0  # number of prompt tokens newly cached by this request
    scored: list[ScoredToken] = field(default_factory=list)  # prompt scores from the second token on, if requested
    routes: TokenRoutes | None = None  # set when the request ends, if its routed experts are recorded

    @property
    def request_id(self) -> int:
        """Id of the request."""
        return self.spec.request_id

    @property
    def length(self) -> int:
        """Number of prompt tokens and generated tokens."""
        return self.spec.prompt_len + len(self.generated)

    @property
    def first_generated(self) -> int:
        """Position of the first generated token. After an interruption, generated tokens are part of the prompt."""
        return self.spec.prompt_len - self.spec.num_replayed

    def generated_after(self, count: int) -> list[int]:
        """Return the generated tokens after the first `count`."""
        return list(map(int, self.tokens(self.first_generated + count, self.length)))

    @property
    def is_prefilling(self) -> bool:
        """True while prompt tokens remain to be computed."""
        return self.computed < self.spec.prompt_len

    @property
    def samples_this_step(self) -> bool:
        """True if the step samples tokens for this request."""
        return self.computed + self.scheduled - len(self.drafts) == self.length

    @property
    def scores_prompt(self) -> bool:
        """True if this step computes log-probabilities of prompt tokens for this request."""
        return self.spec.log_probs.of_prompt and self.is_prefilling and bool(self.scheduled)

    @property
    def inputs(self) -> Sequence[int] | npt.NDArray[np.int64]:
        """Input tokens of the step, shape [scheduled]."""
        if self.drafts:
            return [*self.tokens(self.computed, self.length), *self.drafts]
        return self.tokens(self.computed, self.computed + self.scheduled)

    def tokens(self, start: int, end: int) -> Sequence[int] | npt.NDArray[np.int64]:
        """Return the tokens at positions [start, end) of the prompt followed by the generated tokens."""
        prompt_len = self.spec.prompt_len
        if end <= prompt_len:
            return self.spec.prompt[start:end]
        if start >= prompt_len:
            return self.generated[start - prompt_len : end - prompt_len]
        return [*self.spec.prompt[start:].tolist(), *self.generated[: end - prompt_len]]

    def keep(self, emitted: Sequence[int]) -> KeptTokens:
        """Return the sampled tokens up to and including the first that ends the request, or all if none ends it."""
        length, sampling = self.length, self.spec.sampling
        if self.computed + self.scheduled - len(self.drafts) != length:  # it does not sample in this step
            return KeptTokens()
        length += len(emitted)
        if length < self.spec.max_len and sampling.termination_id not in emitted and not sampling.stop_words:
            return KeptTokens(tuple(emitted))
        for count in range(1, len(emitted) + 1):
            if self._ends_with(emitted[:count]):
                return KeptTokens(tuple(emitted[:count]), ends=True)
        return KeptTokens(tuple(emitted))

    def append(self, tokens: Sequence[int]) -> None:
        """Add newly sampled tokens."""
        self.generated.extend(tokens)

    def schedule(self, num_tokens: int, drafts: tuple[int, ...] = ()) -> None:
        """Schedule `num_tokens` tokens for the next step, drafts included."""
        self.scheduled, self.drafts = num_tokens, drafts

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` more tokens as computed, after a step."""
        self.computed += num_tokens
        self.schedule(0)

    def land(self, new: Sequence[int]) -> None:
        """Append the tokens that a decode step kept, and count as many as computed; faster than `append`, `advance`."""
        self.generated.extend(new)
        self.computed += len(new)
        self.scheduled, self.drafts = 0, ()

    def pause(self) -> None:
        """Pause the request until a KV block is free."""
        self.is_paused = True

    def add_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Append KV blocks; a paused request resumes."""
        self.block_ids.extend(blocks)
        self.is_paused = False

    def publish_block(self, block: BlockId) -> None:
        """Count the next block as published, and replace it by the block registered for the same tokens."""
        self.block_ids[self.num_published_blocks] = block
        self.num_published_blocks += 1

    def release_blocks(self) -> None:
        """Forget the request's blocks after their release."""
        self.block_ids = []

    def reserve(self, state: ReservedState) -> None:
        """Add a slot reserved for the state at a boundary that the next step may reach."""
        self.reserved.append(state)

    def unreserve(self, state: ReservedState) -> None:
        """Remove a reserved slot, which is published or cancelled."""
        self.reserved.remove(state)

    def release_source(self) -> None:
        """Forget the pinned state from which the request started."""
        self.source_block = self.source_slot = None

    def publish_checkpoint(self, block: BlockId) -> None:
        """Record the block of the newest decode checkpoint."""
        self.checkpoint = block

    def count_restored(self, *, from_disk: int, from_host: int) -> None:
        """Record how many prompt tokens needed no prefill because they were restored from disk or host memory."""
        self.from_disk, self.from_host = from_disk, from_host

    def count_written(self, num_tokens: int) -> None:
        """Add to the number of prompt tokens that this request has newly cached."""
        self.num_written += num_tokens

    def extend_keys(self, num_tokens: int) -> None:
        """Compute the keys of all blocks among the first `num_tokens` tokens."""
        self.chain.extend(self.tokens(self.chain.num_tokens, num_tokens))

    def lengthen_prompt(self, prompt: npt.NDArray[np.int64]) -> None:
        """Replace the prompt by a longer prompt that starts with it."""
        self.spec = replace(self.spec, prompt=prompt)

    def score(self, tokens: Iterable[ScoredToken]) -> None:
        """Append the log-probabilities and ranks of the next prompt tokens."""
        self.scored.extend(tokens)

    def keep_routes(self, routes: TokenRoutes) -> None:
        """Set the request's routed experts."""
        self.routes = routes

    def _ends_with(self, new: Sequence[int]) -> bool:
        """Return whether the last token of `new` ends the request: an end token, a stop string or the length limit."""
        sampling = self.spec.sampling
        if new[-1] == sampling.termination_id or self.length + len(new) >= self.spec.max_len:
            return True
        if not sampling.stop_words:
            return False
        return any(self._newest_generated(len(word), new) == word for word in sampling.stop_words)

    def _newest_generated(self, count: int, new: Sequence[int]) -> tuple[int, ...]:
        """Return the last `count` generated tokens, including tokens from before an interruption."""
        known = self.tokens(max(self.first_generated, self.length + len(new) - count), self.length)
        return (*map(int, known), *new)[-count:]


def num_decoding(requests: Sequence[RunningRequest]) -> int:
    """Return the number of decode requests; `requests` must list them before the prefill requests."""
    return bisect_left(requests, True, key=lambda request: request.is_prefilling)
