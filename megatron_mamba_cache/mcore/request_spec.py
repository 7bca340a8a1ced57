"""Turn Megatron's request into what the cache needs to know, and say what is wrong with a bad one."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral
from struct import error as PackError
from struct import pack_into
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..config import CacheConfig, is_encodable
from ..policy.logits_settings import logits_settings_of
from ..policy.request_settings import LogProbSettings, PromptBreakpoint, RequestSpec, SamplingSettings

LOGITS, GRAMMAR = "logits_settings", "grammar"
STOP_TOKEN_IDS, BREAKPOINTS = "stop_token_ids", "breakpoints"
PROMPT_TOP_N, ARRIVED = "prompt_top_n", "arrived_s"
"""Attributes of sampling parameters for which Megatron has no field: what `logits_settings_of` reads, a grammar as
`grammars.forms` writes it, token ids that end a request, a list of [position, keep_s] as in `PromptBreakpoint`,
`prompt_top_n` of `LogProbSettings` and `arrived_s` of `RequestSpec`, which all ranks are given alike."""
PROMPT_SCORES, TOP_N_BY_ID = "prompt_scores", "top_n_by_id"
"""The attributes with the answer to `PROMPT_TOP_N`, a `ScoredToken` for each prompt token from the second on, and with
True where `top_n_logprobs` name tokens by the digits of their ids instead of by text."""
_MOST_BREAKPOINTS = 16
_SAMPLING_KINDS = {"temperature": (int, float), "top_p": (int, float), "top_k": (int,), "top_n_logprobs": (int,)}


def spec_of(request: Any, *, seed: int = 0, tenant: str = "") -> RequestSpec:
    """Return the spec of a DynamicInferenceRequest whose sampling parameters are complete; see `RequestSpec`."""
    sampling = request.sampling_params
    prompt = request.prompt_tokens.cpu().numpy().astype(np.int64, copy=False)
    return RequestSpec(
        request_id=request.request_id,
        prompt=prompt,
        max_len=len(prompt) + sampling.num_tokens_to_generate,
        sampling=SamplingSettings(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=seed,
            termination_id=-1 if sampling.termination_id is None else sampling.termination_id,
            stop_words=tuple(tuple(word) for word in request.stop_word_ids or () if len(word)),
            logits=logits_settings_of(getattr(sampling, LOGITS, None)),
            grammar=getattr(sampling, GRAMMAR, ""),
        ),
        tenant=tenant,
        log_probs=LogProbSettings(
            wanted=sampling.return_log_probs,
            skip_prompt=sampling.skip_prompt_log_probs,
            top_n=sampling.top_n_logprobs,
            names_ids=bool(getattr(sampling, TOP_N_BY_ID, False)),
            prompt_top_n=getattr(sampling, PROMPT_TOP_N, None),
        ),
        breakpoints=tuple(PromptBreakpoint(*place) for place in getattr(sampling, BREAKPOINTS, ())),
        arrived_s=getattr(sampling, ARRIVED, 0),
    )


def valid_spec_of(
    request: Any, config: CacheConfig, vocab_size: int, num_blocks: int, only_last_logits: bool
) -> RequestSpec:
    """Return the spec of a DynamicInferenceRequest that bypasses the engine.

    Args:
        num_blocks, only_last_logits: See `fault_of` and `contradiction_in`.

    Raises:
        ValueError: If the engine would refuse the request, or its number of tokens to generate is not set.
    """
    check_identity(request.request_id, None, "")
    fault = contradiction_in(request.sampling_params, only_last_logits)
    if fault is None and request.sampling_params.num_tokens_to_generate is None:
        fault = "num_tokens_to_generate is None; an int is needed"
    if fault is None:
        spec = spec_of(request)
        fault = fault_of(spec, config, vocab_size, num_blocks)
    if fault is not None:
        raise ValueError(f"request {request.request_id} cannot run: {fault}")
    return spec


def contradiction_in(sampling: Any, only_last_logits: bool, *, ranks_prompts: bool = False) -> str | None:
    """Return which sampling parameters are of a wrong type or contradict each other, or the engine; None if none do.

    Args:
        only_last_logits: True when the engine computes logits of each row's last token only and scores no prompts.
        ranks_prompts: True when the engine scores prompts apart from steps, with ranks.
    """
    for name in ("num_tokens_to_generate", "num_tokens_total"):
        if type(getattr(sampling, name)) not in (int, NoneType):
            return f"{name} is {getattr(sampling, name)!r}; it must be an int or None"
    end = sampling.termination_id
    if end is not None and not (isinstance(end, Integral) and abs(int(end)) < 2**31):
        return f"termination_id is {end!r}; it must be a token id, -1 for none, or None for the tokenizer's"
    if sampling.num_tokens_to_generate is not None and sampling.num_tokens_total is not None:
        return (
            f"num_tokens_to_generate={sampling.num_tokens_to_generate} and num_tokens_total="
            f"{sampling.num_tokens_total} are both set; set one of them to None"
        )
    try:
        logits_settings_of(getattr(sampling, LOGITS, None))
    except ValueError as error:
        return str(error)
    if not isinstance(getattr(sampling, GRAMMAR, ""), str):
        return f"{GRAMMAR} is {getattr(sampling, GRAMMAR)!r:.200}; it must be text"
    if not _are_breakpoints(getattr(sampling, BREAKPOINTS, ())):
        return (
            f"{BREAKPOINTS} is {getattr(sampling, BREAKPOINTS)!r:.200}; it must be a list of at most "
            f"{_MOST_BREAKPOINTS} pairs of a position and seconds"
        )
    if not _are_natural([getattr(sampling, ARRIVED, 0)]):
        return f"{ARRIVED} is {getattr(sampling, ARRIVED)!r:.200}; it must be whole seconds"
    if not _are_natural(getattr(sampling, STOP_TOKEN_IDS, ())):
        return f"{STOP_TOKEN_IDS} is {getattr(sampling, STOP_TOKEN_IDS)!r:.200}; it must be a list of token ids"
    for name, kinds in _SAMPLING_KINDS.items():
        value = getattr(sampling, name)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return f"{name} is {value!r}; it must be a number of type {kinds[-1].__name__}"
    if sampling.top_n_logprobs > 0 and not sampling.return_log_probs:
        return f"top_n_logprobs={sampling.top_n_logprobs} needs return_log_probs=True"
    if sampling.return_log_probs and not sampling.skip_prompt_log_probs and only_last_logits:
        return (
            "log-probs of the prompt are off: build the engine with scores_prompts=True or "
            "materialize_only_last_token_logits=False, or set skip_prompt_log_probs=True"
        )
    return _fault_of_prompt_top_n(sampling, ranks_prompts)


def fault_of(spec: RequestSpec, config: CacheConfig, vocab_size: int, num_blocks: int) -> str | None:
    """Return what makes a request impossible, with value, limit and setting; None for a good one.

    Args:
        num_blocks: KV blocks that one request can have at most.
    """
    prompt, sampling = spec.prompt, spec.sampling
    limit, num_to_generate = config.max_sequence_length, spec.max_len - len(prompt)
    if prompt.ndim != 1:
        return f"the prompt has shape {prompt.shape}; one row of token ids is needed"
    if not len(prompt):
        return "the prompt is empty; at least 1 token is needed"
    worst = prompt.min() if prompt.min() < 0 else prompt.max()
    if not 0 <= worst < vocab_size:
        return f"token {worst} in the prompt is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})"
    if len(prompt) >= limit:
        return f"the prompt has {len(prompt)} tokens, which leaves none to generate below max_sequence_length={limit}"
    if num_to_generate < 1:
        return f"num_tokens_to_generate is {num_to_generate}; it must be 1 or more (num_tokens_total above the prompt)"
    if spec.max_len > limit:
        return (
            f"{len(prompt)} prompt tokens and {num_to_generate} to generate make {spec.max_len}, above "
            f"max_sequence_length={limit}"
        )
    needed = -(-(spec.max_len - 1) // config.block_size_tokens)  # the last token sampled is never computed
    if needed > num_blocks:
        return (
            f"{spec.max_len - 1} tokens need {needed} KV blocks and there are {num_blocks}; raise "
            "--inference-dynamic-batching-buffer-size-gb"
        )
    fault = _fault_of_sampling(sampling) or _fault_of_log_probs(spec.log_probs, vocab_size)
    if fault is None and sampling.grammar and sampling.logits.min_tokens:
        fault = (
            f"min_tokens is {sampling.logits.min_tokens}; a reply that follows a grammar ends where the grammar says"
        )
    return fault or sampling.logits.fault(vocab_size)


def check_identity(request_id: object, seed: object, tenant: object) -> None:
    """Raise `ValueError` unless these can name a request, seed its random numbers and salt its block keys."""
    if not (isinstance(request_id, int) and 0 <= request_id < 2**63):
        raise ValueError(f"request id is {request_id!r}; it must be an int from 0 to 2**63 - 1")
    if not (seed is None or isinstance(seed, int)) or not is_encodable(tenant):
        raise ValueError(f"seed is {seed!r}, tenant {tenant!r}; seed must be an int or None, tenant Unicode text")


def _fault_of_sampling(sampling: SamplingSettings) -> str | None:
    if 0 <= sampling.temperature < math.inf and 0 <= sampling.top_k < 2**31 and 0 <= sampling.top_p <= 1:
        return None
    return (
        f"temperature={sampling.temperature}, top_k={sampling.top_k}, top_p={sampling.top_p}: needed are "
        "temperature >= 0 and finite, top_k >= 0 and below 2**31, and top_p from 0 to 1"
    )


def _are_natural(found: Any) -> bool:
    return isinstance(found, list | tuple) and all(type(token) is int and 0 <= token < 2**31 for token in found)


def _are_breakpoints(found: Any) -> bool:
    if not isinstance(found, list | tuple) or len(found) > _MOST_BREAKPOINTS:
        return False
    return all(_are_natural(place) and len(place) == 2 for place in found)


def _fault_of_log_probs(settings: LogProbSettings, vocab_size: int) -> str | None:
    for name, count in (("top_n_logprobs", settings.top_n), (PROMPT_TOP_N, settings.prompt_top_n or 0)):
        if not 0 <= count <= vocab_size:
            return f"{name} is {count}; it must be from 0 to the vocabulary's {vocab_size}"
    return None


def _fault_of_prompt_top_n(sampling: Any, ranks_prompts: bool) -> str | None:
    count = getattr(sampling, PROMPT_TOP_N, None)
    if count is None:
        return None
    if type(count) is not int:
        return f"{PROMPT_TOP_N} is {count!r:.200}; it must be an int or None"
    if not sampling.return_log_probs or sampling.skip_prompt_log_probs:
        return f"{PROMPT_TOP_N}={count} needs return_log_probs=True and skip_prompt_log_probs=False"
    if not ranks_prompts:
        return f"{PROMPT_TOP_N}={count} needs an engine built with scores_prompts=True and the last logits only"
    return None


def other_ends(sampling: Any, tokenizer: Any) -> list[list[int]]:
    """Return, as stop words, what ends a request besides its tokenizer's `eod`.

    These are the tokenizer's other end tokens, unless the request sets `termination_id`, and `STOP_TOKEN_IDS`.
    """
    end_ids = getattr(tokenizer, "other_end_ids", ()) if sampling.termination_id is None else ()
    return [[end_id] for end_id in (*end_ids, *getattr(sampling, STOP_TOKEN_IDS, ()))]


def fault_of_end(spec: RequestSpec, tokenizer: Any) -> str | None:
    """Return which end token of a grammar's text would not end its request; None if all do, or it has no grammar."""
    if not spec.sampling.grammar:
        return None
    ends = {spec.sampling.termination_id, *(word[0] for word in spec.sampling.stop_words if len(word) == 1)}
    missing = [end for end in (tokenizer.eod, *getattr(tokenizer, "other_end_ids", ())) if end >= 0 and end not in ends]
    if not missing:
        return None
    return (
        f"termination_id is {spec.sampling.termination_id}, and a reply that follows a grammar ends with token "
        f"{missing[0]}; leave termination_id None"
    )


def prompt_ids(prompt: Any) -> npt.NDArray[np.int64]:
    """Return the token ids of a prompt in any sequence, array or tensor as a vector of their own.

    Raises:
        TypeError: If it is none of them.
        ValueError: If an entry is not a 64-bit integer; the message names it and its place.
    """
    found = prompt
    if isinstance(prompt, Tensor):
        found = prompt.cpu().numpy() if prompt.dtype == torch.int64 else prompt.tolist()
    if type(found) is np.ndarray and found.ndim == 1 and found.dtype == np.int64:  # a masked array hides tokens
        return np.array(found)
    try:
        tokens = found if type(found) is list else list(found.tolist() if isinstance(found, np.ndarray) else found)
    except TypeError:
        raise TypeError(f"a prompt is text or a sequence of token ids, found {prompt!r:.100}") from None
    with suppress(OverflowError, TypeError), np.errstate(all="ignore"):  # the loop below takes milliseconds
        ids = packed_ids(tokens)
        # The sum of what only stands for integers is no `int`, and a bool is 0 or 1.
        if type(sum(tokens)) is int and not any(type(tokens[at]) is bool for at in np.flatnonzero((ids | 1) == 1)):
            return ids
    for place, token in enumerate(tokens):
        is_integer = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not (is_integer and -(2**63) <= token < 2**63):
            raise ValueError(f"token {place} of the prompt is {token!r:.100}; token ids are integers of 64 bits")
    return packed_ids(tokens)


def packed_ids(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return integers as a vector, in less than half the time that NumPy takes.

    Raises:
        OverflowError: If one has more than 64 bits.
        TypeError: If one is no integer.
    """
    ids = np.empty(len(tokens), np.int64)
    try:
        pack_into(f"{len(tokens)}q", ids.data, 0, *tokens)
    except PackError as error:
        kind = OverflowError if all(isinstance(token, Integral) for token in tokens) else TypeError
        raise kind(f"need integers of 64 bits: {error}") from error
    return ids


@contextmanager
def scoring_allowed(sampling: Any) -> Iterator[None]:
    """Let the block add a request whose prompt is scored, although Megatron asserts that all logits exist."""
    skips, sampling.skip_prompt_log_probs = sampling.skip_prompt_log_probs, True
    try:
        yield
    finally:
        sampling.skip_prompt_log_probs = skips
