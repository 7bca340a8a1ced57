"""Latencies, throughput and hit rates of a served load, and the upper bound on the hit rate."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loads.open_loop import ServedLoad
from loads.prefix_bound import skippable_tokens

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a time over all requests, in seconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """Measurements of one engine under one load.

    Args:
        num_requests, num_ended: Number of requests that were sent, and that have their whole reply.
        num_unsent: Number of turns that had not arrived at the time limit.
        first_token, first_token_later: Time to first token of all turns, and of second and later turns. A request that
            was still waiting at the time limit counts with its waiting time so far.
        wait: Time from the arrival to the start of the step that admitted the request.
        per_token: Mean time per token of a reply after its first token.
        generated_per_s, tokens_per_s: Generated tokens per second, and the same plus the prompt tokens of answered
            requests. The time is from the start of the load to the last reply or the time limit.
        prompt_tokens, cached_tokens, skippable_tokens: Prompt tokens of requests that ended: all, those that needed no
            prefill, and the maximum that any cache could have skipped (see `prefix_bound`).
        peak_state_gib: Maximum number of state slots in use (including live and draft states), in GiB.
        step_s: Mean time of a step.
        host_s, gpu_idle_share: As in `gpu_time.GpuTime`.
    """

    num_requests: int
    num_ended: int
    num_unsent: int
    first_token: Percentiles | None
    first_token_later: Percentiles | None
    wait: Percentiles | None
    per_token: Percentiles | None
    generated_per_s: float
    tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    skippable_tokens: int
    peak_state_gib: float
    num_steps: int
    step_s: float
    host_s: float | None
    gpu_idle_share: float | None

    @property
    def hit_rate(self) -> float:
        """Fraction of the prompt tokens that needed no prefill."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def best_hit_rate(self) -> float:
        """Upper bound on the hit rate: the hit rate of a cache that evicts nothing."""
        return self.skippable_tokens / max(1, self.prompt_tokens)


def figures_of(load: ServedLoad, block_size: int, slot_bytes: int) -> ServingFigures:
    """Return the measurements of a load that has been served."""
    turns, ended = load.turns, [turn for turn in load.turns if turn.has_ended]
    delays = [turn.time_to_first_token or load.seconds - turn.arrival for turn in turns]
    later = [delay for turn, delay in zip(turns, delays, strict=True) if turn.turn]
    generated = sum(len(turn.token_moments) for turn in turns)
    answered = sum(len(turn.prompt) for turn in turns if turn.token_moments)
    skippable = zip(turns, skippable_tokens(turns, block_size), strict=True)
    return ServingFigures(
        num_requests=len(turns),
        num_ended=len(ended),
        num_unsent=load.num_unsent,
        first_token=percentiles(delays),
        first_token_later=percentiles(later),
        wait=percentiles(turn.admitted - turn.arrival for turn in turns if turn.admitted is not None),
        per_token=percentiles(pace for turn in ended if (pace := turn.time_per_output_token) is not None),
        generated_per_s=generated / load.seconds,
        tokens_per_s=(generated + answered) / load.seconds,
        prompt_tokens=sum(len(turn.prompt) for turn in ended),
        cached_tokens=sum(turn.cached for turn in ended),
        skippable_tokens=sum(count for turn, count in skippable if turn.has_ended),
        peak_state_gib=load.peak_slots * slot_bytes / GIB,
        num_steps=load.num_steps,
        step_s=load.step_s / max(1, load.num_steps),
        host_s=load.gpu.host_s if load.gpu else None,
        gpu_idle_share=load.gpu.idle_share if load.gpu else None,
    )


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Return the 50th, 95th and 99th percentile; None if there are no values."""
    ordered = sorted(values)
    return Percentiles(*(nearest_rank(ordered, percent) for percent in (50, 95, 99))) if ordered else None


def nearest_rank(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest value that is at least as large as `percent` percent of the values."""
    return ordered[math.ceil(percent * len(ordered) / 100) - 1]


Cell = Callable[[ServingFigures], str]
ROWS: dict[str, Cell] = {
    "requests": lambda figures: f"{figures.num_requests:,}",
    "finished requests; turns not sent": lambda figures: f"{figures.num_ended:,}; {figures.num_unsent:,}",
    "time to first token of all turns, ms: p50, p95, p99": lambda figures: _in_ms(figures.first_token, 3),
    "time to first token of later turns, ms: p50, p95, p99": lambda figures: _in_ms(figures.first_token_later, 3),
    "wait for admission, ms: p50, p95, p99": lambda figures: _in_ms(figures.wait, 3),
    "time per output token, ms: p50, p95": lambda figures: _in_ms(figures.per_token, 2),
    "generated tokens/s": lambda figures: f"{figures.generated_per_s:,.1f}",
    "prompt and generated tokens/s": lambda figures: f"{figures.tokens_per_s:,.0f}",
    "prompt tokens without prefill, %": lambda figures: f"{100 * figures.hit_rate:.1f}",
    "upper bound for any cache, %": lambda figures: f"{100 * figures.best_hit_rate:.1f}",
    "peak memory of state slots, GiB": lambda figures: f"{figures.peak_state_gib:.3g}",
    "steps": lambda figures: f"{figures.num_steps:,}",
    "mean step, ms": lambda figures: f"{1e3 * figures.step_s:.2f}",
    "host work per step, ms": lambda figures: "" if figures.host_s is None else f"{1e3 * figures.host_s:.2f}",
    "GPU idle inside steps, %": lambda figures: (
        "" if figures.gpu_idle_share is None else f"{100 * figures.gpu_idle_share:.1f}"
    ),
}


def table(found: dict[str, ServingFigures]) -> str:
    """Return a Markdown table with a line per quantity and a column per engine; omit quantities that no engine has."""
    lines = [f"| | {' | '.join(found)} |", "|---|" + "---:|" * len(found)]
    for name, cell in ROWS.items():
        cells = [cell(figures) for figures in found.values()]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _in_ms(values: Percentiles | None, count: int) -> str:
    if values is None:
        return ""
    return ", ".join(f"{1e3 * value:,.1f}" for value in (values.p50, values.p95, values.p99)[:count])
