"""Waiting and running requests, as the prefix cache uses them."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from .block_hashing import BlockKeyChain, KeyChain
from .identifiers import BlockId, DraftBufferId, SlotId
from .kept_tokens import KeptTokens
from .request_settings import RequestSpec, ScoredToken


@dataclass(slots=True, eq=False)
class Candidate:
    """Request that waits for admission, with the keys of its prompt's blocks (computed once per epoch).

    Args:
        age: Order of first admission; None if the request never ran.
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
        """Start a new epoch: store its keys and note that no copy has been awaited yet."""
        self.chain, self.epoch, self.awaited_copy = chain, epoch, False

    def forget_keys(self) -> None:
        """Discard the keys, because another epoch may have the same number."""
        self.epoch = -1

    def restart(self, age: int | None, generated: Sequence[int]) -> None:
        """Queue the request again after an interruption, with the tokens that it has generated."""
        self.spec, self.age = self.spec.continued(generated), age
        self.forget_keys()


@dataclass(frozen=True, slots=True)
class ReservedState:
    """Slot reserved for a boundary state that the running step writes; not yet findable."""

    position: int  # absolute
    slot: SlotId


@dataclass(slots=True, eq=False)
class StateCursor:
    """Slots of a request's live state and of the states after its drafts. Only its `DraftStates` changes it.

    With draft slots, the live state is in column `accepted` - 1 of the request's draft window, whose column 0 is the
    live slot. That slot also holds what is stored once for all columns. With a draft buffer, the live slot holds the
    state after the first `num_folded` tokens, and the buffer holds the inputs of the tokens after them.

    Args:
        draft_buffer: Index of the request's draft buffer; None if it uses draft slots.
        draft_slots: Columns 1, 2, ... of the draft window.
        accepted: Number of tokens that the last step kept.
        resolved: Number of tokens in the live slot's state when a buffer was last folded into it; 0 if never.
    """

    live_slot: SlotId
    draft_buffer: DraftBufferId | None = None
    draft_slots: list[SlotId] = field(default_factory=list)
    accepted: int = 1
    resolved: int = 0

    @property
    def state_slot(self) -> SlotId:
        """Slot of the live state: the last accepted column."""
        return self.draft_slots[self.accepted - 2] if self.draft_slots and self.accepted > 1 else self.live_slot

    def accept(self, num_tokens: int) -> None:
        """Move to the state after `num_tokens` tokens of the last step."""
        self.accepted = num_tokens

    def add_slots(self, slots: list[SlotId]) -> None:
        """Append columns."""
        self.draft_slots += slots

    def remove_last_slot(self) -> None:
        """Remove the last column."""
        del self.draft_slots[-1]

    def resolve(self, num_tokens: int) -> None:
        """Note that the live slot now holds the state after all `num_tokens` computed tokens."""
        self.accepted, self.resolved = 1, num_tokens

    def release_buffer(self) -> None:
        """Drop the buffer."""
        self.draft_buffer = None


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that holds KV blocks and a live state.

    `computed` tokens have KV and are folded into the live state; `scheduled` more are computed by the step in
    preparation, the last of which are `drafts`. `tokens[computed]` is the next input.

    Only a request's methods change its fields, `cursor` excepted. `PrefixCache` makes the same change to the pools.
    """

    spec: RequestSpec
    chain: KeyChain
    epoch: int
    age: int  # order of first admission; older requests (smaller) are preempted later
    cursor: StateCursor
    block_ids: list[BlockId]
    num_shared_blocks: int  # number of leading blocks that were found in the cache, which are never written
    computed: int
    scheduled: int = 0
    generated: list[int] = field(default_factory=list)
    num_published_blocks: int = 0
    source_block: BlockId | None = None  # block whose pinned state this step starts from
    source_slot: SlotId | None = None
    reserved: list[ReservedState] = field(default_factory=list)
    is_paused: bool = False
    drafts: tuple[int, ...] = ()
    branches: tuple[int, ...] = ()  # boundaries of the prompt at which waiting requests diverged
    checkpoint: BlockId | None = None  # block of the newest decode checkpoint
    from_host: int = 0  # number of prompt tokens skipped because they were restored from host memory
    from_disk: int = 0  # number of prompt tokens skipped because they were restored from disk
    num_written: int = 0  # number of prompt tokens up to newly published states at boundaries without one before
    scored: list[ScoredToken] = field(default_factory=list)  # scores of the prompt tokens from the second on, if wanted

    @property
    def request_id(self) -> int:
        """Id of the request."""
        return self.spec.request_id

    @property
    def length(self) -> int:
        """Number of known tokens, prompt and generated."""
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
        """Return the tokens at positions [start, end), counted over prompt and generated tokens."""
        prompt_len = self.spec.prompt_len
        if end <= prompt_len:
            return self.spec.prompt[start:end]
        if start >= prompt_len:
            return self.generated[start - prompt_len : end - prompt_len]
        return [*self.spec.prompt[start:].tolist(), *self.generated[: end - prompt_len]]

    def keep(self, emitted: Sequence[int]) -> KeptTokens:
        """Return the sampled tokens to keep: all, or those through the token that ends the request."""
        if not self.samples_this_step:
            return KeptTokens()
        sampling, length = self.spec.sampling, self.length + len(emitted)
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

    def land_token(self, new: Sequence[int]) -> None:
        """Append the token of a one-token step and advance by it; a single call, because most steps need both."""
        self.generated.extend(new)
        self.computed += 1
        self.scheduled = 0

    def pause(self) -> None:
        """Pause the request until a KV block is free."""
        self.is_paused = True

    def add_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Append KV blocks; a paused request resumes."""
        self.block_ids.extend(blocks)
        self.is_paused = False

    def publish_block(self, block: BlockId) -> None:
        """Count the next block as published and replace it with the registered block of the same tokens."""
        self.block_ids[self.num_published_blocks] = block
        self.num_published_blocks += 1

    def release_blocks(self) -> None:
        """Forget the request's blocks after their release."""
        self.block_ids = []

    def reserve(self, state: ReservedState) -> None:
        """Add a slot for the state at a boundary that the step may reach."""
        self.reserved.append(state)

    def unreserve(self, state: ReservedState) -> None:
        """Remove a reserved slot, which is published or cancelled."""
        self.reserved.remove(state)

    def release_source(self) -> None:
        """Forget the pinned state from which the request started."""
        self.source_block = self.source_slot = None

    def publish_checkpoint(self, block: BlockId) -> None:
        """Note the block of the newest decode checkpoint."""
        self.checkpoint = block

    def count_restored(self, *, from_disk: int, from_host: int) -> None:
        """Note how many skipped prompt tokens were restored from lower tiers."""
        self.from_disk, self.from_host = from_disk, from_host

    def count_written(self, num_tokens: int) -> None:
        """Count prompt tokens up to a newly published state."""
        self.num_written += num_tokens

    def extend_keys(self, num_tokens: int) -> None:
        """Compute the keys of all blocks among the first `num_tokens` tokens."""
        self.chain.extend(self.tokens(self.chain.num_tokens, num_tokens))

    def lengthen_prompt(self, prompt: npt.NDArray[np.int64]) -> None:
        """Replace the prompt by a longer one that starts with it."""
        self.spec = replace(self.spec, prompt=prompt)

    def score(self, tokens: Iterable[ScoredToken]) -> None:
        """Add the scores of the next prompt tokens."""
        self.scored.extend(tokens)

    def _ends_with(self, new: Sequence[int]) -> bool:
        """Return whether the last token of `new` ends the request: an end token, the length limit or a stop word."""
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
    """Return how many of a step's requests decode; decode requests come before prefill requests."""
    return bisect_left(requests, True, key=lambda request: request.is_prefilling)
