"""A request as the cache sees it: what was asked for, and its progress."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .block_hashing import KeyChain
from .identifiers import BlockId, RingId, SlotId
from .kept_tokens import KeptTokens
from .logits_settings import PLAIN_LOGITS, LogitsSettings


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How a request's tokens are drawn and when it ends.

    Args:
        temperature, top_k, top_p: 0 switches top_k and top_p off; temperature 0 or top_k 1 is greedy.
        seed: Seed of the request's counter-based random numbers.
        termination_id: Token that ends the request; -1 for none.
        stop_words: Token sequences that end it.
        logits: How the model's logits are changed before a token is drawn.
        grammar: What the generated text has to follow, as `grammars.forms` writes it; "" for nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 0
    termination_id: int = -1
    stop_words: tuple[tuple[int, ...], ...] = ()
    logits: LogitsSettings = PLAIN_LOGITS
    grammar: str = ""

    @property
    def changes_logits(self) -> bool:
        """True when a token is not drawn from the model's own logits."""
        return self.logits is not PLAIN_LOGITS or bool(self.grammar)

    @property
    def is_greedy(self) -> bool:
        """True when no random number is needed."""
        return self.top_k == 1 or self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class LogProbSettings:
    """Which log-probabilities a request wants: of generated tokens, of the prompt too, and how many alternatives.

    Args:
        top_n: The best tokens in the place of each, by text.
        prompt_top_n: Those in the place of each prompt token, by id and with ranks; None for no ranks.
        names_ids: Whether the best tokens are named by the digits of their ids instead of by text.
    """

    wanted: bool = False
    skip_prompt: bool = False
    top_n: int = 0
    prompt_top_n: int | None = None
    names_ids: bool = False

    @property
    def of_prompt(self) -> bool:
        """True when log-probabilities of the prompt are wanted."""
        return self.wanted and not self.skip_prompt

    @property
    def most_of_prompt(self) -> int:
        """The best tokens that are needed in the place of each prompt token."""
        return max(self.top_n, self.prompt_top_n or 0)


class ScoredToken(NamedTuple):
    """A prompt token's log-prob and rank, and the best tokens in its place, best first.

    Args:
        rank: 1 plus the number of tokens that are more probable in its place.
    """

    log_prob: float
    rank: int
    best_log_probs: tuple[float, ...] = ()
    best_ids: tuple[int, ...] = ()

    def cut(self, top_n: int) -> "ScoredToken":
        """Return it with only so many of the best tokens."""
        return ScoredToken(self.log_prob, self.rank, self.best_log_probs[:top_n], self.best_ids[:top_n])


class PromptBreakpoint(NamedTuple):
    """A position in a prompt at which other prompts are expected to part from it.

    Args:
        keep_s: Seconds from the request's arrival for which the state before it is worth more.
    """

    position: int
    keep_s: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RequestSpec:
    """The settings of a request, fixed for its life. After an interruption, `continued` makes what runs from them.

    Args:
        prompt: [prompt_len] int64 token ids, never empty.
        max_len: Prompt and generated tokens together.
        tenant: Salt that keeps this request's prefixes apart from other tenants'.
        num_replayed: Tokens at the prompt's end that this request generated before it was interrupted.
        breakpoints: The last boundary up to each gets a state.
        arrived_s: When the request came, in seconds of the clock that stamps all requests; 0 if none does.
    """

    request_id: int
    prompt: npt.NDArray[np.int64]
    max_len: int
    sampling: SamplingSettings
    tenant: str = ""
    log_probs: LogProbSettings = LogProbSettings()
    num_replayed: int = 0
    breakpoints: tuple[PromptBreakpoint, ...] = ()
    arrived_s: int = 0
    prompt_len: int = field(init=False)  # read many times a step

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_len", len(self.prompt))

    @property
    def may_skip(self) -> bool:
        """True when cached prompt tokens may be skipped; False when their log-probs are wanted."""
        return not self.log_probs.of_prompt

    def continued(self, generated: Sequence[int]) -> "RequestSpec":
        """Return what runs after an interruption: the same request, prefilled with all that it has generated too."""
        if not generated:
            return self
        prompt = np.concatenate((self.prompt, np.array(generated, np.int64)))
        log_probs = replace(self.log_probs, skip_prompt=True)  # those of the prompt came with the first token
        return replace(self, prompt=prompt, num_replayed=len(generated), log_probs=log_probs)


@dataclass(slots=True, eq=False)
class Candidate:
    """A request that waits for admission, with the keys of its prompt's blocks.

    The keys are computed once for each epoch of the cache, however often admission is tried.
    """

    spec: RequestSpec
    chain: KeyChain
    epoch: int
    awaited_copy: bool = False  # of what it starts from, in this epoch


@dataclass(frozen=True, slots=True)
class ReservedState:
    """A slot given to a boundary of a running step, not findable yet."""

    position: int  # absolute
    slot: SlotId


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that holds KV blocks and a live state.

    `computed` tokens have KV and are folded into the live state; `scheduled` more are computed by the step in
    preparation, the last of which are `drafts`. `tokens[computed]` is the next input.

    The live SSM state is in column `accepted` - 1 of the draft window, whose column 0 is the live slot. Earlier columns
    are no longer needed, except that the live slot holds the conv windows of all columns. Where states are replayed,
    the live slot has the state of the first `folded` tokens, and `ring` the inputs of those after them.
    """

    spec: RequestSpec
    chain: KeyChain
    epoch: int
    age: int  # order of first admission; smaller is older and is preempted later
    live_slot: SlotId
    block_ids: list[BlockId]
    num_shared_blocks: int  # leading blocks that were found cached: never written
    computed: int
    scheduled: int = 0
    generated: list[int] = field(default_factory=list)
    num_published_blocks: int = 0
    source_block: BlockId | None = None  # whose pinned state this step starts from
    source_slot: SlotId | None = None
    reserved: list[ReservedState] = field(default_factory=list)
    is_paused: bool = False
    drafts: tuple[int, ...] = ()
    draft_slots: list[SlotId] = field(default_factory=list)  # columns 1, 2, ... of the draft window
    accepted: int = 1  # tokens that the last step kept
    ring: RingId | None = None  # None: states are not replayed
    settled: int = 0  # tokens that a settled live slot holds, if any were settled
    branches: tuple[int, ...] = ()  # boundaries of the prompt at which requests that waited part from it
    checkpoint: BlockId | None = None  # whose state is this request's newest decode checkpoint
    from_host: int = 0  # prompt tokens that it skips because they came back from the host's memory
    from_disk: int = 0  # likewise, from the disk
    num_written: int = 0  # prompt tokens up to the states that it published which no state resumed before
    scored: list[ScoredToken] = field(default_factory=list)  # prompt tokens, from the second on, if wanted

    @property
    def request_id(self) -> int:
        """Id of the request."""
        return self.spec.request_id

    @property
    def length(self) -> int:
        """Known tokens, prompt and generated."""
        return self.spec.prompt_len + len(self.generated)

    @property
    def first_generated(self) -> int:
        """Where the generated text begins, that included which is part of the prompt since an interruption."""
        return self.spec.prompt_len - self.spec.num_replayed

    def generated_after(self, count: int) -> list[int]:
        """Return the generated tokens but for the first `count`."""
        return list(map(int, self.tokens(self.first_generated + count, self.length)))

    @property
    def is_prefilling(self) -> bool:
        """True while prompt tokens are still to be computed."""
        return self.computed < self.spec.prompt_len

    @property
    def samples_this_step(self) -> bool:
        """True when the step yields tokens that this request keeps."""
        return self.computed + self.scheduled - len(self.drafts) == self.length

    @property
    def scores_prompt(self) -> bool:
        """True when the step's tokens precede prompt tokens whose log-probs are wanted, or complete such a prompt."""
        return self.spec.log_probs.of_prompt and self.is_prefilling and bool(self.scheduled)

    @property
    def inputs(self) -> Sequence[int] | npt.NDArray[np.int64]:
        """The [scheduled] tokens that the step feeds."""
        if self.drafts:
            return [*self.tokens(self.computed, self.length), *self.drafts]
        return self.tokens(self.computed, self.computed + self.scheduled)

    @property
    def state_slot(self) -> SlotId:
        """Slot of the live SSM state: the draft window's column that the last step accepted."""
        return self.draft_slots[self.accepted - 2] if self.draft_slots and self.accepted > 1 else self.live_slot

    def folded(self, ring_len: int) -> int:
        """Return how many tokens the replayed state in the live slot holds: a step folds what it finds whole rings of.

        The prompt's are there since its prefill ended.
        """
        start_of_last_step = self.computed - self.accepted
        return max(self.spec.prompt_len, self.settled, start_of_last_step // ring_len * ring_len)

    def tokens(self, start: int, end: int) -> Sequence[int] | npt.NDArray[np.int64]:
        """Return the tokens at absolute positions [start, end) of prompt and generated text."""
        prompt_len = self.spec.prompt_len
        if end <= prompt_len:
            return self.spec.prompt[start:end]
        if start >= prompt_len:
            return self.generated[start - prompt_len : end - prompt_len]
        return [*self.spec.prompt[start:].tolist(), *self.generated[: end - prompt_len]]

    def keep(self, emitted: Sequence[int]) -> KeptTokens:
        """Return the newly sampled tokens to keep: all, or those up to the one that ends the request."""
        if not self.samples_this_step:
            return KeptTokens()
        sampling, length = self.spec.sampling, self.length + len(emitted)
        if length < self.spec.max_len and sampling.termination_id not in emitted and not sampling.stop_words:
            return KeptTokens(tuple(emitted))
        for count in range(1, len(emitted) + 1):
            if self._ends_with(emitted[:count]):
                return KeptTokens(tuple(emitted[:count]), ends=True)
        return KeptTokens(tuple(emitted))

    def _ends_with(self, new: Sequence[int]) -> bool:
        """Return whether the last of `new` ends the request: end token, length limit or the end of a stop word."""
        sampling = self.spec.sampling
        if new[-1] == sampling.termination_id or self.length + len(new) >= self.spec.max_len:
            return True
        if not sampling.stop_words:
            return False
        return any(self._newest_generated(len(word), new) == word for word in sampling.stop_words)

    def _newest_generated(self, count: int, new: Sequence[int]) -> tuple[int, ...]:
        """Return the last `count` generated tokens, or all; those from before an interruption count too."""
        known = self.tokens(max(self.first_generated, self.length + len(new) - count), self.length)
        return (*map(int, known), *new)[-count:]


def num_decoding(rows: Sequence[RunningRequest]) -> int:
    """Return how many of a step's rows decode; they come before those that prefill."""
    return bisect_left(rows, True, key=lambda row: row.is_prefilling)
