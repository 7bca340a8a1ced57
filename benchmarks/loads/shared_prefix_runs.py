"""Requests that share a prefix, served with and without a cache, and the difference of two runs' logits."""

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
    """Requests that share a prefix, and prompts to measure speed with; all lengths in tokens.

    Args:
        shared: Length of the prefix.
        first: Length of the rest of the first prompt, whose reply of `first_reply` tokens crosses a block boundary.
        own: Length of the rest of each other prompt.
        turn: Length of the turn that continues the first reply in its own prompt.
        reply: Length of all other replies.
        small_step: Most tokens of a small step.
        num_long, long, long_reply: Number and lengths of the prompts to measure speed with.
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
    """The difference of two runs' logits, over the vocabulary, at positions after equal tokens.

    Args:
        positions: Number of generated tokens whose logits were compared.
        median, largest: Median and maximum of the absolute differences.
        mean_largest: Mean over positions of the largest difference.
    """

    positions: int
    median: float
    largest: float
    mean_largest: float


def some_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    """Return random tokens."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts_of(workload: Workload, vocab_size: int) -> dict[int, list[int]]:
    """Return the prompts that share a prefix, by request id, except the one that continues the first reply."""
    shared = some_tokens(workload.shared, vocab_size, seed=0)
    lengths = (workload.first, *workload.own)
    return {number: shared + some_tokens(length, vocab_size, number + 1) for number, length in enumerate(lengths)}


def serve_cached(model: Any, config: CacheConfig, workload: Workload) -> tuple[Traces, dict[int, list[int]]]:
    """Serve the requests one after another with a cache; return their traces and all prompts.

    Raises:
        RuntimeError: If a request did not hit its shared prefix, or the turn did not hit the reply before it.
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
        raise RuntimeError(f"the next turn skipped {traces[TURN].cached} tokens, no more than the prompt before it")
    return traces, prompts


def check_hits(traces: Mapping[int, Trace], shared: int) -> None:
    """Raise `RuntimeError` if a request did not skip the shared prefix."""
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
    """Serve the first request with a cache, then all others at once; call `between` on the engine in between."""
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
    """Serve all requests without a cache, each alone or all at once."""
    with TracedEngine.over(model, config) as traced:
        if not alone:
            return traced.serve(prompts, num_tokens)
        traces = [traced.serve({request_id: prompt}, num_tokens) for request_id, prompt in prompts.items()]
    return {request_id: trace for served in traces for request_id, trace in served.items()}


def difference(left: Traces, right: Traces) -> Difference:
    """Compare the logits of two runs, each request's until its tokens differ, leaving out the first request."""
    medians, maxima = [], []
    for request_id in (left.keys() & right.keys()) - {FIRST}:  # the first finds nothing cached
        for ours, theirs in comparable_logits(left[request_id], right[request_id]):
            apart = (ours.float() - theirs.float()).abs()
            medians.append(float(apart.median()))
            maxima.append(float(apart.max()))
    return Difference(len(maxima), median(medians), max(maxima), sum(maxima) / len(maxima))


def comparable_logits(left: Trace, right: Trace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both logits at each position whose earlier tokens are all equal."""
    pairs = zip(left.tokens, right.tokens, strict=False)
    num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    both = list(zip(left.logits, right.logits, strict=False))
    return iter(both[: num_equal + 1])
