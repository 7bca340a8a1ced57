"""Convert Megatron's sampling parameters to a request spec, and serialize a spec for another process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.inference.sampling_params import SamplingParams
from torch import Tensor
from typing_extensions import override

from ..config import is_encodable
from ..policy.logits_settings import logits_settings_of
from ..policy.request_rules import RequestRules
from ..policy.request_settings import LogProbSettings, PromptBreakpoint, RequestSpec, SamplingSettings, packed_ids

SPEC = "spec"
"""Attribute of sampling parameters that holds fields of `RequestSpec.as_mapping`; these override Megatron's fields."""
PROMPT_SCORES = "prompt_scores"
"""Attribute of a reply's sampling parameters that holds a `ScoredToken` per prompt token from the second on.

It exists only if the request asked for scores of its prompt.
"""
_MOST_BREAKPOINTS = 16


class SpecParams(SamplingParams):
    """Sampling parameters that contain a request spec; Megatron's own fields are set from it."""

    def __init__(self, spec: RequestSpec) -> None:
        carried = spec.as_mapping()
        super().__init__(**{name: carried[name] for name in _OF_MEGATRON.keys() & carried.keys()})
        self.spec = spec

    @override
    def serialize(self) -> dict[str, Any]:
        """Return a dict that msgpack can serialize."""
        return {**super().serialize(), SPEC: self.spec.as_mapping()}


def spec_of(
    request: Any,
    *,
    stop_words: Sequence[Sequence[int]] = (),
    longest: int | None = None,
    seed: int | None = None,
    default_seed: int = 0,
    tenant: str = "",
) -> RequestSpec:
    """Return the spec for a DynamicInferenceRequest; `RequestRules` may still reject it.

    Args:
        stop_words: Token ids of each stop string that Megatron's parameters contain as text.
        longest: Default for the maximum total number of prompt and generated tokens; None if the request must set one.
        seed, tenant: Override the request's parameters, unless `seed` is None or `tenant` is "", respectively.
        default_seed: Seed if the request sets none.

    Raises:
        ValueError: If a parameter has the wrong type or contradicts another parameter.
    """
    asked = _asked_of(request.sampling_params)
    prompt = request.prompt_tokens.cpu().numpy().astype(np.int64, copy=False)
    seed, end = asked.get("seed") if seed is None else seed, asked["termination_id"]
    ends = [*stop_words, *asked.get("stop_words", ()), *([end] for end in asked.get("stop_token_ids", ()))]
    return RequestSpec(
        request_id=request.request_id,
        prompt=prompt,
        max_len=_max_len(asked, len(prompt), longest),
        sampling=SamplingSettings(
            temperature=asked["temperature"],
            top_k=asked["top_k"],
            top_p=asked["top_p"],
            seed=default_seed if seed is None else seed,
            termination_id=None if end is None else int(end),
            stop_words=tuple(tuple(word) for word in ends if len(word)),
            logits=logits_settings_of(asked.get("logits")),
            grammar=asked.get("grammar", ""),
        ),
        tenant=tenant or asked.get("tenant", ""),
        log_probs=LogProbSettings(
            wanted=asked["return_log_probs"],
            skip_prompt=asked["skip_prompt_log_probs"],
            top_n=asked["top_n_logprobs"],
            names_ids=bool(asked.get("top_n_by_id", False)),
            prompt_top_n=asked.get("prompt_top_n"),
        ),
        breakpoints=tuple(PromptBreakpoint(*point) for point in asked.get("breakpoints", ())),
        arrived_s=asked.get("arrived_s", 0),
        returns_routes=asked.get("returns_routes"),
    )


def checked_spec_of(request: Any, rules: RequestRules) -> RequestSpec:
    """Return the spec for a DynamicInferenceRequest added without an engine; raise `ValueError` if it can never run."""
    check_identity(request.request_id, None, "")
    try:
        spec = spec_of(request, stop_words=request.stop_word_ids or ())
        problem = rules.error_of(spec)
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        raise ValueError(f"request {request.request_id} cannot run: {problem}")
    return spec


def ended_by(spec: RequestSpec, tokenizer: Any) -> RequestSpec:
    """Return the spec with the tokenizer's end tokens added, unless the request sets `termination_id`."""
    if spec.sampling.termination_id is not None:
        return spec
    eod, others = getattr(tokenizer, "eod", None), getattr(tokenizer, "other_end_ids", ())
    stop_words = (*spec.sampling.stop_words, *((end,) for end in others))
    return replace(
        spec, sampling=replace(spec.sampling, termination_id=-1 if eod is None else eod, stop_words=stop_words)
    )


def check_identity(request_id: object, seed: object, tenant: object) -> None:
    """Raise `ValueError` unless a request's id, seed and tenant are valid."""
    if not (isinstance(request_id, int) and 0 <= request_id < 2**63):
        raise ValueError(f"request id is {request_id!r}; it must be an int between 0 and 2**63 - 1")
    if not (seed is None or isinstance(seed, int)) or not is_encodable(tenant):
        raise ValueError(
            f"seed is {seed!r} and tenant is {tenant!r}; seed must be an int or None, and tenant Unicode text"
        )


def error_of_end(spec: RequestSpec, tokenizer: Any) -> str | None:
    """Return an error if a request with a grammar would not end at an end token of the tokenizer; otherwise None."""
    if not spec.sampling.grammar:
        return None
    ends = spec.sampling.end_ids
    missing = [end for end in (tokenizer.eod, *getattr(tokenizer, "other_end_ids", ())) if end >= 0 and end not in ends]
    if not missing:
        return None
    return (
        f"termination_id is {spec.sampling.termination_id}, but a reply that follows a grammar ends with token "
        f"{missing[0]}; set termination_id to None"
    )


def prompt_ids(prompt: Any) -> npt.NDArray[np.int64]:
    """Copy the token ids of a prompt (sequence, array or tensor) into a new vector.

    Raises:
        TypeError: If the prompt is not a sequence, array or tensor.
        ValueError: If an entry is not a 64-bit integer; the message contains the entry and its index.
    """
    found = prompt
    if isinstance(prompt, Tensor):
        found = prompt.cpu().numpy() if prompt.dtype == torch.int64 else prompt.tolist()
    if type(found) is np.ndarray and found.ndim == 1 and found.dtype == np.int64:  # not a masked array
        return np.array(found)
    try:
        tokens = found if type(found) is list else list(found.tolist() if isinstance(found, np.ndarray) else found)
    except TypeError:
        raise TypeError(f"a prompt must be text or a sequence of token ids, found {prompt!r:.100}") from None
    with suppress(OverflowError, TypeError), np.errstate(all="ignore"):  # fast path; the loop below takes milliseconds
        ids = packed_ids(tokens)
        # Only a sequence of ints has a sum of type `int`, apart from bools, which count as 0 or 1.
        if type(sum(tokens)) is int and not any(type(tokens[at]) is bool for at in np.flatnonzero((ids | 1) == 1)):
            return ids
    for index, token in enumerate(tokens):
        is_integer = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not (is_integer and -(2**63) <= token < 2**63):
            raise ValueError(f"token {index} of the prompt is {token!r:.100}; token ids must be 64-bit integers")
    return packed_ids(tokens)


def _asked_of(sampling: Any) -> dict[str, Any]:
    """Return the values of Megatron's fields, overridden by those of `SPEC`, after checking their types."""
    carried = getattr(sampling, SPEC, {})
    if not isinstance(carried, Mapping) or not carried.keys() <= _CARRIED.keys():
        raise ValueError(f"{SPEC} is {carried!r:.200}; it must be a mapping whose keys are among {sorted(_CARRIED)}")
    asked = {name: getattr(sampling, name) for name in _OF_MEGATRON} | dict(carried)
    for name, value in asked.items():
        is_valid, needed = (_OF_MEGATRON | _CARRIED)[name]
        if not is_valid(value):
            raise ValueError(f"{name} is {value!r:.200}; it must be {needed}")
    return asked


def _max_len(asked: Mapping[str, Any], prompt_len: int, longest: int | None) -> int:
    """Return the requested maximum total number of prompt and generated tokens."""
    num_tokens, total = asked["num_tokens_to_generate"], asked["num_tokens_total"]
    if num_tokens is not None and total is not None:
        raise ValueError(
            f"num_tokens_to_generate={num_tokens} and num_tokens_total={total} are both set; set one of them to None"
        )
    if num_tokens is not None:
        return prompt_len + int(num_tokens)
    length = longest if total is None else total
    if length is None:
        raise ValueError("num_tokens_to_generate is None; it must be an int")
    return int(length)


_Field = tuple[Callable[[Any], bool], str]


def _is_number(kinds: tuple[type, ...]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


def _are_natural(found: Any) -> bool:
    return isinstance(found, list | tuple) and all(type(token) is int and 0 <= token < 2**31 for token in found)


def _are_words(found: Any) -> bool:
    return isinstance(found, list | tuple) and all(map(_are_natural, found))


def _are_breakpoints(found: Any) -> bool:
    return _are_words(found) and len(found) <= _MOST_BREAKPOINTS and all(len(point) == 2 for point in found)


_COUNT: _Field = (lambda value: value is None or type(value) is int, "an int or None")
_END: _Field = (
    lambda value: value is None or (isinstance(value, Integral) and abs(int(value)) < 2**31),
    "a token id, -1 for no end token, or None for the tokenizer's end token",
)
_FLAG: _Field = (lambda _: True, "a bool")
_OF_MEGATRON: dict[str, _Field] = {
    "num_tokens_to_generate": _COUNT,
    "num_tokens_total": _COUNT,
    "termination_id": _END,
    "temperature": (_is_number((int, float)), "an int or a float"),
    "top_p": (_is_number((int, float)), "an int or a float"),
    "top_k": (_is_number((int,)), "an int"),
    "top_n_logprobs": (_is_number((int,)), "an int"),
    "return_log_probs": _FLAG,
    "skip_prompt_log_probs": _FLAG,
}
_CARRIED: dict[str, _Field] = {
    **{name: field for name, field in _OF_MEGATRON.items() if name != "num_tokens_total"},
    "seed": _COUNT,
    "tenant": (is_encodable, "Unicode text"),
    "stop_words": (_are_words, "a list of lists of token ids"),
    "stop_token_ids": (_are_natural, "a list of token ids"),
    "logits": (lambda _: True, "a mapping"),  # `logits_settings_of` checks the value
    "grammar": (lambda found: isinstance(found, str), "a str"),
    "top_n_by_id": _FLAG,
    "prompt_top_n": _COUNT,
    "breakpoints": (_are_breakpoints, f"a list of at most {_MOST_BREAKPOINTS} pairs (position, seconds)"),
    "arrived_s": (lambda found: _are_natural([found]), "a non-negative int, in seconds"),
    "returns_routes": (lambda found: found in (None, True, False), "a bool or None"),
}
