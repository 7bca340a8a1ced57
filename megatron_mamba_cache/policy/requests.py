"""A request as the cache sees it: what was asked for, and how far it has come."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .block_hashing import BlockKeyChain
from .identifiers import BlockId, SlotId


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How a request's tokens are drawn and when it ends.

    Args:
        temperature, top_k, top_p: 0 switches top_k and top_p off; temperature 0 or top_k 1 is greedy.
        seed: Of the request's own counter-based random numbers.
        termination_id: Token that ends the request; -1 for none.
        stop_words: Token sequences that end it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 0
    termination_id: int = -1
    stop_words: tuple[tuple[int, ...], ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.top_k == 1 or self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class LogProbSettings:
    """Which log-probabilities a request wants: of generated tokens, of the prompt too, and how many alternatives."""

    wanted: bool = False
    skip_prompt: bool = False
    top_n: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RequestSpec:
    """What a request asks for.

    Args:
        prompt: [prompt_len] int64 token ids, never empty.
        max_len: Prompt and generated tokens together.
        tenant: Salt that keeps this request's prefixes apart from other tenants'.
        num_replayed: Tokens at the prompt's end that this request generated before it was interrupted.
    """

    request_id: int
    prompt: npt.NDArray[np.int64]
    max_len: int
    sampling: SamplingSettings
    tenant: str = ""
    log_probs: LogProbSettings = LogProbSettings()
    num_replayed: int = 0

    @property
    def prompt_len(self) -> int:
        """Tokens in the prompt."""
        return len(self.prompt)

    @property
    def may_skip(self) -> bool:
        """Whether prompt tokens may be left uncomputed: not if their log-probs are wanted."""
        return self.log_probs.skip_prompt or not self.log_probs.wanted


@dataclass(slots=True, eq=False)
class Candidate:
    """A request that waits for admission, with the keys of its prompt's blocks.

    The keys are computed once for each epoch of the cache, however often admission is tried.
    """

    spec: RequestSpec
    chain: BlockKeyChain
    epoch: int


@dataclass(frozen=True, slots=True)
class ReservedState:
    """A slot given to a boundary of a running step, not findable yet."""

    position: int  # absolute
    slot: SlotId


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that holds KV blocks and a live state.

    `computed` tokens have KV and are folded into the live state; `scheduled` more are computed by the step in
    preparation. `tokens[computed]` is the next input.
    """

    spec: RequestSpec
    chain: BlockKeyChain
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

    @property
    def request_id(self) -> int:
        """Id of the request."""
        return self.spec.request_id

    @property
    def length(self) -> int:
        """Tokens known: the prompt and what was sampled."""
        return self.spec.prompt_len + len(self.generated)

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return self.computed < self.spec.prompt_len

    @property
    def samples_this_step(self) -> bool:
        """Whether the step's last token of this row yields a token that is kept."""
        return self.computed + self.scheduled == self.length

    def tokens(self, start: int, end: int) -> Sequence[int] | npt.NDArray[np.int64]:
        """Return tokens start to end, absolute positions, of prompt and generated text."""
        prompt_len = self.spec.prompt_len
        if end <= prompt_len:
            return self.spec.prompt[start:end]
        if start >= prompt_len:
            return self.generated[start - prompt_len : end - prompt_len]
        return [*self.spec.prompt[start:].tolist(), *self.generated[: end - prompt_len]]

    def ends_with(self, token: int) -> bool:
        """Whether `token`, sampled next, ends the request: end token, length limit or the end of a stop word."""
        sampling = self.spec.sampling
        if token == sampling.termination_id or self.length + 1 >= self.spec.max_len:
            return True
        return any((*self._newest_generated(len(word) - 1), token) == word for word in sampling.stop_words)

    def _newest_generated(self, count: int) -> list[int]:
        """Return the last `count` generated tokens, or all; those of before an interruption are generated too."""
        first_generated = self.spec.prompt_len - self.spec.num_replayed
        return [int(token) for token in self.tokens(max(first_generated, self.length - count), self.length)]
