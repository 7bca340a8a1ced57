"""Build an engine from a model and a `CacheConfig`."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .config import CacheConfig
from .mcore.context import MambaCacheContext
from .mcore.controller import MambaCacheController
from .mcore.engine import MambaCacheEngine
from .mcore.model_ranks import expert_peers_of_process, ranks_of_process
from .mcore.served_model import check_served, wrap_model
from .mcore.step_reads import step_time_of
from .ranks.group import Ranks, on_all_ranks
from .replicas.engine import ReplicaEngine
from .speculation.all_drafts import AllDrafts
from .speculation.draft_planner import DraftPlanner, NoDrafts
from .speculation.draft_policy import DraftPolicy
from .speculation.drafter import Drafter, ReadsHiddenStates, TakesTime, UsesModelMemory
from .speculation.prompt_lookup import AutoDrafter, PromptLookupDrafter
from .speculation.step_time import StepTime

_WORD_BYTES = 8
_WORDS_AT_ONCE = 2**22
_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)


@torch.no_grad()
def weights_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """Return a 32-byte digest of the tensors' names, shapes, dtypes and contents; their order does not matter.

    The bytes of a tensor are read as 64-bit words on its device. Each word is multiplied by an odd number derived from
    its index, and the products are added modulo 2**64, twice with different multipliers. If a single word differs, the
    digest always differs; if several words differ, the probability of an equal digest is 2**-126.
    """
    whole = hashlib.sha256()
    for name, tensor in sorted(named_tensors, key=lambda pair: pair[0]):
        sums = [_sum_of(tensor, seed) for seed in _SEEDS]
        whole.update(repr((name, tuple(tensor.shape), str(tensor.dtype), sums)).encode())
    return whole.digest()


def _sum_of(tensor: Tensor, seed: int) -> int:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first, words in _words_of(tensor):
        indices = torch.arange(first, first + len(words), dtype=torch.int64, device=words.device)
        total += (words * _scrambled(indices + _signed(seed))).sum()
    return int(total)


def _words_of(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (offset in words, int64 words) for consecutive chunks of a tensor's bytes; the last word is zero-padded."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = _WORDS_AT_ONCE * _WORD_BYTES
    for first in range(0, octets.numel(), size):
        piece = octets[first : first + size]
        if piece.numel() % _WORD_BYTES or piece.data_ptr() % _WORD_BYTES:
            missing = -piece.numel() % _WORD_BYTES
            piece = torch.cat((piece, piece.new_zeros(missing)))
        yield first // _WORD_BYTES, piece.view(torch.int64)


def _scrambled(numbers: Tensor) -> Tensor:
    """Return a pseudorandom odd int64 number for each number; equal inputs give equal outputs."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ _shifted(numbers, shift)) * _signed(factor)
    return (numbers ^ _shifted(numbers, 31)) | 1


def _shifted(numbers: Tensor, count: int) -> Tensor:
    """Shift int64 numbers right by `count` bits without sign extension."""
    return (numbers >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


class TokenIdTokenizer:
    """Tokenizer for models without one: its texts are decimal token ids separated by spaces.

    Args:
        image_tokens: Names of image, video and audio tokens, keyed by token id.
    """

    eod = -1
    bos = None
    writes_text = False

    def __init__(self, vocab_size: int, image_tokens: Mapping[int, str] = MappingProxyType({})) -> None:
        self.vocab_size = vocab_size
        self.image_tokens = dict(image_tokens)  # a plain dict, so that it can be pickled for the coordinator
        self.longest_token = len(f"{vocab_size} ")

    def tokenize(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Parse the token ids in a text; `add_special_tokens` has no effect, because there are no special tokens."""
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: list[int], **_: Any) -> str:
        """Return token ids as decimal numbers separated by spaces."""
        return " ".join(str(token) for token in tokens)

    def bytes_of(self, token: int) -> bytes:
        """Return a token id's decimal digits as bytes."""
        return str(token).encode()


def build_engine(
    model: Any,
    config: CacheConfig | None = None,
    *,
    drafter: Drafter | AutoDrafter | None = None,
    tokenizer: Any = None,
    random_seed: int = 0,
    materialize_only_last_token_logits: bool = True,
    scores_prompts: bool = False,
) -> MambaCacheEngine:
    """Build an engine that serves a model with prefix caching.

    With tensor or pipeline parallelism, each rank must build an engine, add the same requests in the same order and run
    the same number of steps; every rank then returns all tokens. With expert parallelism alone, each rank has its own
    requests, but all ranks run each step together.

    Args:
        model: MambaModel built from a `with_mamba_cache` spec, or this rank's shard of it; it is put into eval mode.
        config: Settings for the cache; None for the defaults.
        drafter: Drafter that proposes draft tokens; None for `PromptLookupDrafter`, or for no drafts if
            `num_speculative_tokens` is 0.
        tokenizer: Object with `tokenize`, `detokenize`, `bos` and `eod`; None for a `TokenIdTokenizer`.
        random_seed: Seed for requests that do not set one.
        materialize_only_last_token_logits: True to compute logits only where a token is sampled or verified; False to
            compute them for every token in every step.
        scores_prompts: True to allow requests for prompt log-probs while only the last logits are materialized (see
            `step/prompt_log_probs.py`). A step that scores a prompt uses no CUDA graph; other steps are unaffected.

    Raises:
        ValueError: If, on any rank, the model is not hybrid, lacks the caching modules or does not match `config`.
        TypeError: If the model is not a MambaModel, or the settings are not a CacheConfig.
    """
    if not isinstance(config, CacheConfig | None):
        raise TypeError(f"config must be a CacheConfig or None, found {config!r:.200}")
    config, ranks, chain = config or CacheConfig(), ranks_of_process(), _chain_of(drafter)
    shape = check_served(model, ranks, config.max_sequence_length, chain and chain.head)
    _check_hidden_states(drafter, model.config.hidden_size, materialize_only_last_token_logits, ranks.num_stages)
    step_time = step_time_of(model, shape, config, ranks)
    context = MambaCacheContext(
        config,
        shape,
        planner=on_all_ranks(ranks, lambda: _planner(config, drafter, shape.vocab_size, step_time, ranks)),
        materialize_only_last_token_logits=materialize_only_last_token_logits,
        scores_prompts=scores_prompts,
        ranks=ranks,
        peers=expert_peers_of_process(),
        weights=lambda: _digest_of(model, chain and chain.head),
    )
    tokenizer = tokenizer or TokenIdTokenizer(shape.vocab_size)
    return ReplicaEngine(MambaCacheController(wrap_model(model, context, chain), tokenizer), context, random_seed)


def _chain_of(drafter: Drafter | AutoDrafter | None) -> Any:
    main = _main_of(drafter)
    return main.mtp_chain if isinstance(main, UsesModelMemory) else None  # None on other stages than the last


def _digest_of(model: Any, head: Any) -> bytes:
    named = [*model.state_dict().items(), *(() if head is None else head.state_dict(prefix="mtp.").items())]
    return weights_digest((name, found) for name, found in named if isinstance(found, Tensor))


def _planner(
    config: CacheConfig, drafter: Drafter | AutoDrafter | None, vocab_size: int, time: StepTime, ranks: Ranks
) -> DraftPlanner | NoDrafts:
    lookup = None
    if isinstance(drafter, AutoDrafter):
        drafter, lookup = drafter.drafter, PromptLookupDrafter() if config.adaptive_drafts else None
    if drafter is not None and (isinstance(drafter, type) or not isinstance(drafter, Drafter)):
        needed = "an object with propose() and forget(), such as PromptLookupDrafter()"
        raise TypeError(f"drafter is {drafter!r:.100}; it must be {needed}")
    max_drafts = config.num_speculative_tokens
    if max_drafts:
        drafter = drafter or PromptLookupDrafter()
        policy = _policy(config, drafter, time, ranks, has_lookup=lookup is not None)
        return DraftPlanner(drafter, max_drafts, vocab_size, policy, lookup)
    if drafter is not None:
        raise ValueError(
            "a drafter is given, but num_speculative_tokens is 0; set num_speculative_tokens to at least 1"
        )
    return NoDrafts()


def _policy(
    config: CacheConfig, drafter: Drafter, time: StepTime, ranks: Ranks, *, has_lookup: bool
) -> DraftPolicy | AllDrafts:
    if not config.adaptive_drafts:
        return AllDrafts()
    if not isinstance(drafter, TakesTime):
        return DraftPolicy(time, has_lookup=has_lookup)
    is_free = drafter.draft_seconds(1, 1) == 0
    # No shadow drafts on several ranks: a drafter that fails on one rank would make the ranks' drafts differ.
    shadows = is_free and ranks.num_ranks == 1 and not isinstance(drafter, ReadsHiddenStates)
    return DraftPolicy(time, drafter.draft_seconds, shadows=shadows, is_patient=not is_free, has_lookup=has_lookup)


def _main_of(drafter: Drafter | AutoDrafter | None) -> Drafter | None:
    return drafter.drafter if isinstance(drafter, AutoDrafter) else drafter


def _check_hidden_states(
    drafter: Drafter | AutoDrafter | None, hidden_size: int, only_last: bool, num_stages: int
) -> None:
    drafter = _main_of(drafter)
    if not isinstance(drafter, ReadsHiddenStates | UsesModelMemory):
        return
    name = type(drafter).__name__
    if isinstance(drafter, ReadsHiddenStates) and (width := drafter.hidden_size) != hidden_size:
        raise ValueError(f"{name} reads hidden states of size {width}, but the model's hidden size is {hidden_size}")
    if not only_last:
        raise ValueError(f"{name} reads hidden states: build the engine with materialize_only_last_token_logits=True")
    if num_stages > 1 and isinstance(drafter, ReadsHiddenStates):
        raise ValueError(
            f"{name} reads hidden states, which exist only on the last of {num_stages} pipeline stages; use 1 stage"
        )
