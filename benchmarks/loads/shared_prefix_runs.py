"""Serve requests with a shared prefix, with and without a cache, and compare the logits of two runs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Any

import torch
from measuring.traced_engine import Trace, TracedEngine

from megatron_mamba_cache import CacheConfig

FIRST, TURN = 0, 99
Traces = dict[int, Trace]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with a shared prefix, and prompts for speed measurements; all lengths in tokens.

    Args:
        shared: Length of the shared prefix.
        first: Length of the rest of the first prompt. Its reply of `first_reply` tokens crosses a block boundary.
        own: Length of the rest of each other prompt.
        turn: Number of tokens that a later turn adds to the first prompt and its reply.
        reply: Length of all other replies.
        small_step: Maximum number of tokens of a small step.
        num_long, long, long_reply: Number of prompts for speed measurements, and lengths of their prompts and replies.
    """

    shared: int
    first: int
    first_reply: int
    own: tuple[int, ...]
    turn: int
    reply: int
    small_step: int
    num_long: int
    long: int
    long_reply: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences between the logits of two runs, at positions before which all tokens are equal.

    Args:
        positions: Number of generated tokens whose logits were compared.
        median, largest: Median and maximum of all absolute differences.
        mean_largest: Mean over positions of the largest absolute difference at a position.
    """

    positions: int
    median: float
    largest: float
    mean_largest: float


def some_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    """Return random token ids."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts_of(workload: Workload, vocab_size: int) -> dict[int, list[int]]:
    """Return the prompts with the shared prefix by request id, except that of the turn after the first reply."""
    shared = some_tokens(workload.shared, vocab_size, seed=0)
    lengths = (workload.first, *workload.own)
    return {number: shared + some_tokens(length, vocab_size, number + 1) for number, length in enumerate(lengths)}


def serve_cached(model: Any, config: CacheConfig, workload: Workload) -> tuple[Traces, dict[int, list[int]]]:
    """Serve the requests one after another with a cache; return their traces and all prompts.

    Raises:
        RuntimeError: If a request does not hit the shared prefix, or the later turn does not hit the first reply.
    """
    vocab_size = model.vocab_size
    prompts = prompts_of(workload, vocab_size)
    with TracedEngine.over(model, config) as traced:
        traces = traced.serve({FIRST: prompts[FIRST]}, workload.first_reply)
        new_text = some_tokens(workload.turn, vocab_size, seed=TURN)
        prompts[TURN] = prompts[FIRST] + traces[FIRST].tokens + new_text
        for request_id in (*range(1, 1 + len(workload.own)), TURN):
            traces |= traced.serve({request_id: prompts[request_id]}, workload.reply)
    check_hits(traces, workload.shared)
    if traces[TURN].cached <= len(prompts[FIRST]):
        raise RuntimeError(
            f"the later turn must hit the preceding reply, but it skipped only {traces[TURN].cached} tokens"
        )
    return traces, prompts


def check_hits(traces: Mapping[int, Trace], shared: int) -> None:
    """Raise `RuntimeError` if a request did not hit the shared prefix."""
    missed = [request_id for request_id, trace in traces.items() if request_id != FIRST and trace.cached < shared]
    if missed:
        raise RuntimeError(f"requests {missed} did not find the prefix of {shared} tokens")


def serve_cached_together(
    model: Any,
    config: CacheConfig,
    workload: Workload,
    prompts: dict[int, list[int]],
    between: Callable[[TracedEngine], object] = lambda _: None,
) -> Traces:
    """Serve the first request with a cache, then all others concurrently.

    Args:
        between: Function that is called with the engine after the first request.
    """
    others = {request_id: prompt for request_id, prompt in prompts.items() if request_id != FIRST}
    with TracedEngine.over(model, config) as traced:
        traces = traced.serve({FIRST: prompts[FIRST]}, workload.first_reply)
        between(traced)
        traces |= traced.serve(others, workload.reply)
    check_hits(traces, workload.shared)
    return traces


def serve_uncached(
    model: Any, config: CacheConfig, prompts: dict[int, list[int]], num_tokens: int, *, alone: bool
) -> Traces:
    """Serve all requests without a cache, one after another if `alone`, otherwise concurrently."""
    with TracedEngine.over(model, config) as traced:
        if not alone:
            return traced.serve(prompts, num_tokens)
        traces = [traced.serve({request_id: prompt}, num_tokens) for request_id, prompt in prompts.items()]
    return {request_id: trace for served in traces for request_id, trace in served.items()}


def difference(left: Traces, right: Traces) -> Difference:
    """Compare the logits of two runs, for each request until its tokens differ; the first request is not compared."""
    medians, maxima = [], []
    for request_id in (left.keys() & right.keys()) - {FIRST}:  # the first request cannot hit the cache
        for ours, theirs in comparable_logits(left[request_id], right[request_id]):
            apart = (ours.float() - theirs.float()).abs()
            medians.append(float(apart.median()))
            maxima.append(float(apart.max()))
    return Difference(len(maxima), median(medians), max(maxima), sum(maxima) / len(maxima))


def comparable_logits(left: Trace, right: Trace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the logits of both runs at each position before which all tokens are equal."""
    pairs = zip(left.tokens, right.tokens, strict=False)
    num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    both = list(zip(left.logits, right.logits, strict=False))
    return iter(both[: num_equal + 1])
