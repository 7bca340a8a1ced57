"""Compare an engine's cached and uncached logits, relative to the differences between uncached runs; measure its speed.

    PYTHONPATH=. python3 benchmarks/engine_8b.py [--shape NAME] [--json FILE]

The model is a NemotronH with 8B parameters or another model of `loads/model_sizes.py`, with random weights in bf16.
Requests share a long prefix, and one of them continues the reply of another. The same requests are served in several
ways: without a cache, one after another; without a cache, concurrently, in large steps and in small steps whose chunks
end at any token; and with a cache, one after another and concurrently.

The cached runs may differ from the first run by no more than uncached runs differ from each other. A control run whose
cached states are lost must differ by more.

Then a model of the same width with fewer layers, in fp32 without TF32, must generate the same tokens with and without a
cache. If two tokens differ, a float64 model that shares no code with the package checks that its two best logits are
within 1e-5, so that rounding can select either token. In the speed results, a step with at least one prompt token
counts as prefill.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from device_agreement import MARGIN, ROOT
from load_8b import SHAPES, Shape, stopwatch
from loads.model_sizes import MODEL_FIELDS
from loads.random_checkpoint import random_model
from loads.shared_prefix_runs import (
    FIRST,
    Difference,
    Workload,
    difference,
    prompts_of,
    serve_cached,
    serve_cached_together,
    serve_uncached,
    some_tokens,
)
from measuring.ceilings import matmul_tflops
from measuring.machine import describe_machine
from measuring.model_floors import prompt_flops
from measuring.traced_engine import StepTimes, Trace, TracedEngine

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries

SLACK = 1.1
"""Factor by which a value may exceed the largest of a few random differences."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A bf16 model, the layers of the smaller fp32 model, and the requests of both."""

    shape: Shape
    fp32_layers: dict[str, Any]
    fp32_kv_gb: float
    workload: Workload


LARGE = Workload(2048, 192, 72, (2, 5, 33, 300, 800, 1100), 100, 8, 1000, num_long=8, long=4096, long_reply=33)
SMALL = Workload(128, 40, 30, (2, 16, 70), 20, 4, 50, num_long=3, long=256, long_reply=5)
_TINY_EXPERTS = SHAPES["tiny"].fields | {
    "hybrid_override_pattern": "MEM*E",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 96,
    "routed_scaling_factor": 2.5,
}
_TINY_GRANITE = MODEL_FIELDS["granite-tiny"] | {
    "layer_types": ["mamba", "attention", "mamba"],
    "logits_scaling": 0.1,
    "hidden_size": 64,
    "vocab_size": 512,
    "intermediate_size": 48,
    "shared_intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_TINY_QWEN = MODEL_FIELDS["qwen36-35b"] | {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 512,
    "head_dim": 32,
    "num_attention_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
    "max_position_embeddings": 1024,
}
_8B = replace(SHAPES["8b"], state_gb=6.0, kv_gb=4.0)


def _large(name: str, fp32_layers: dict[str, Any]) -> Scale:
    fields = MODEL_FIELDS[name] | {"max_position_embeddings": 8192}
    return Scale(replace(_8B, fields=fields), fp32_layers, fp32_kv_gb=4.0, workload=LARGE)


_GRANITE_LAYERS = {"layer_types": ["mamba", "mamba", "attention", "mamba"]}
SCALES = {
    "8b": _large("8b", {"hybrid_override_pattern": "M-M*-M*-"}),
    "nano3": _large("nano3", {"hybrid_override_pattern": "MEM*E"}),
    "granite-small": _large("granite-small", _GRANITE_LAYERS),
    "granite-tiny": _large("granite-tiny", _GRANITE_LAYERS),
    "bamba": _large("bamba", {"num_hidden_layers": 4, "attn_layer_indices": [2]}),
    **{name: _large(name, {"num_hidden_layers": 4}) for name in ("qwen36-27b", "qwen36-35b", "qwen3-next")},
    "tiny": Scale(SHAPES["tiny"], {"hybrid_override_pattern": "M*-M-"}, fp32_kv_gb=0.02, workload=SMALL),
    "tiny-experts": Scale(
        replace(SHAPES["tiny"], fields=_TINY_EXPERTS),
        {"hybrid_override_pattern": "MEM*E"},
        fp32_kv_gb=0.02,
        workload=SMALL,
    ),
    "tiny-granite": Scale(
        replace(SHAPES["tiny"], fields=_TINY_GRANITE),
        {"layer_types": ["mamba", "attention"]},
        fp32_kv_gb=0.02,
        workload=SMALL,
    ),
    "tiny-qwen": Scale(
        replace(SHAPES["tiny"], fields=_TINY_QWEN), {"full_attention_interval": 2}, fp32_kv_gb=0.02, workload=SMALL
    ),
}
LARGE_SHAPES = [name for name in SCALES if not name.startswith("tiny")]


def config_of(scale: Scale, *, prefix_caching: bool, max_tokens: int = 8192, kv_gb: float | None = None) -> CacheConfig:
    """Return the settings of an engine."""
    workload, limit = scale.workload, scale.shape.fields["max_position_embeddings"]
    return CacheConfig(
        block_size_tokens=scale.shape.block_size,
        buffer_size_gb=kv_gb or scale.shape.kv_gb,
        prefix_caching=prefix_caching,
        prefix_caching_mamba_gb=scale.shape.state_gb,
        max_requests=max(workload.num_long, len(workload.own) + 2),
        max_tokens=max_tokens,
        max_sequence_length=limit,
        align_prefill_chunks=prefix_caching,
    )


def compare_logits(scale: Scale, model: Any) -> dict[str, Any]:
    """Serve the requests in every way; return the differences, and True if the cached runs agree as required."""
    with_cache, without = config_of(scale, prefix_caching=True), config_of(scale, prefix_caching=False)
    small_steps = config_of(scale, prefix_caching=False, max_tokens=scale.workload.small_step)
    cached, prompts = serve_cached(model, with_cache, scale.workload)
    reply = scale.workload.reply
    alone = serve_uncached(model, without, prompts, reply, alone=True)
    together = serve_uncached(model, without, prompts, reply, alone=False)
    in_small_steps = serve_uncached(model, small_steps, prompts, reply, alone=False)
    cached_together = serve_cached_together(model, with_cache, scale.workload, prompts)
    lost = serve_cached_together(model, with_cache, scale.workload, prompts, TracedEngine.lose_states)
    uncached_pairs = {
        "uncached: together, alone": difference(together, alone),
        "uncached: together in small steps, alone": difference(in_small_steps, alone),
        "uncached: together in small steps, together": difference(in_small_steps, together),
    }
    cached_pairs = {
        "cached alone, uncached alone": difference(cached, alone),
        "cached together, uncached alone": difference(cached_together, alone),
    }
    control = {"control: cached together with states lost, uncached alone": difference(lost, alone)}
    uncached = list(uncached_pairs.values())
    return {
        "differences": {name: asdict(pair) for name, pair in (uncached_pairs | cached_pairs | control).items()},
        "spread of the logits": float(alone[FIRST].logits[0].float().std()),
        "prompt tokens": sum(map(len, prompts.values())),
        "prompt tokens skipped": sum(trace.cached for trace in cached.values()),
        "slack": SLACK,
        "holds": are_no_larger(list(cached_pairs.values()), uncached),
        "lost states would show": not are_no_larger(list(control.values()), uncached),
    }


def are_no_larger(cached: Sequence[Difference], uncached: Sequence[Difference]) -> bool:
    """Return True if the median and largest differences of cached runs are at most SLACK times the uncached ones."""
    return all(
        max(getattr(pair, name) for pair in cached) <= SLACK * max(getattr(pair, name) for pair in uncached)
        for name in ("median", "largest")
    )


def compare_tokens(scale: Scale) -> dict[str, Any]:
    """Compare the tokens of the smaller fp32 model with and without a cache."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = random_model(scale.shape.fields | scale.fp32_layers, torch.float32)
    with_cache = config_of(scale, prefix_caching=True, kv_gb=scale.fp32_kv_gb)
    without = config_of(scale, prefix_caching=False, kv_gb=scale.fp32_kv_gb)
    cached, prompts = serve_cached(model, with_cache, scale.workload)
    cached_together = serve_cached_together(model, with_cache, scale.workload, prompts)
    uncached = {
        **serve_uncached(model, without, {FIRST: prompts.pop(FIRST)}, scale.workload.first_reply, alone=True),
        **serve_uncached(model, without, prompts, scale.workload.reply, alone=False),
    }
    prompts = {FIRST: prompts_of(scale.workload, scale.shape.fields["vocab_size"])[FIRST], **prompts}
    pairs = [(request, run[request], uncached[request]) for run in (cached, cached_together) for request in prompts]
    unequal = [pair for pair in pairs if pair[1].tokens != pair[2].tokens]
    oracle = _oracle(model) if unequal else None
    ties = [_is_a_tie(oracle, prompts[request], ours, theirs) for request, ours, theirs in unequal]
    return {
        "layers": len(model.decoder.layers),
        "requests compared": len(pairs),
        "generated tokens": sum(len(ours.tokens) for _, ours, _ in pairs),
        "equal requests": len(pairs) - len(unequal),
        f"ended at a margin below {MARGIN:g}": sum(ties),
        "requests that differ": [request for (request, *_), tie in zip(unequal, ties, strict=True) if not tie],
        "largest difference of logits": difference(cached, uncached).largest,
    }


def _oracle(model: Any) -> Any:
    sys.path.insert(0, str(ROOT))
    from tests.oracle import HybridOracle

    return HybridOracle.from_megatron(model)


def _is_a_tie(oracle: Any, prompt: list[int], ours: Trace, theirs: Trace) -> bool:
    checks = [oracle.check_greedy(prompt, trace.tokens, MARGIN) for trace in (ours, theirs)]
    return all(check.first_mismatch is None for check in checks)


def measure_speed(scale: Scale, model: Any) -> dict[str, Any]:
    """Serve long prompts without cached prefixes, then again with all blocks except the last one cached."""
    workload, vocab_size = scale.workload, scale.shape.fields["vocab_size"]
    count = workload.num_long
    prompt_tokens = [some_tokens(workload.long, vocab_size, seed) for seed in range(2 * count)]
    with TracedEngine.over(model, config_of(scale, prefix_caching=True), keeps_logits=False) as traced:
        traced.serve(dict(enumerate(prompt_tokens[count:])), workload.long_reply)  # warms up
        figures = {}
        for number, name in enumerate(("cold", "again"), 1):
            prompts = {100 * number + index: prompt for index, prompt in enumerate(prompt_tokens[:count])}
            traces, times = traced.timed(prompts, workload.long_reply)
            figures[name] = speeds(times, prompts) | {"skipped": sum(trace.cached for trace in traces.values())}
    return figures


def prefill_floor(scale: Scale, model: Any) -> dict[str, float]:
    """Return the FLOPs of the uncached prompts' GEMMs, and their time at the speed of a large GEMM; {} on a CPU."""
    if not torch.cuda.is_available():
        return {}
    num_flops = scale.workload.num_long * prompt_flops(model, scale.workload.long)
    return {"FLOPs": num_flops, "TFLOP/s": matmul_tflops(), "s": num_flops / matmul_tflops() / 1e12}


def speeds(times: StepTimes, prompts: Mapping[int, Sequence[int]]) -> dict[str, float]:
    """Return tokens per second: prefilled prompt tokens, all prompt tokens, and decoded tokens."""
    served = sum(map(len, prompts.values()))
    return {
        "prefill, s": times.prefill_s,
        "prompt tokens": served,
        "computed prompt tokens/s": times.prefill_tokens / times.prefill_s,
        "served prompt tokens/s": served / times.prefill_s,
        "decode, s": times.decode_s,
        "decode tokens/s": times.decode_tokens / times.decode_s,
    }


def table(figures: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    logits, tokens, speed = figures["logits"], figures["tokens"], figures["speed"]
    lines = ["| logits in bf16 | tokens | median difference | mean of largest | largest |", "|---|---:|---:|---:|---:|"]
    for name, pair in logits["differences"].items():
        apart = f"{pair['median']:.4g} | {pair['mean_largest']:.4g} | {pair['largest']:.4g}"
        lines.append(f"| {name} | {pair['positions']} | {apart} |")
    lines += [
        "",
        f"Cached runs differ no more than uncached runs, up to a factor of {SLACK}: {_yes(logits['holds'])}. "
        f"Lost states would be detected: {_yes(logits['lost states would show'])}. "
        f"The logits' standard deviation is {logits['spread of the logits']:.3g}; alone with a cache, "
        f"{logits['prompt tokens skipped']:,} of {logits['prompt tokens']:,} prompt tokens were skipped.",
        "",
        "| tokens in fp32 | |",
        "|---|---:|",
        *(f"| {name} | {value} |" for name, value in tokens.items()),
        "",
        "| speed in bf16 | " + " | ".join(next(iter(speed.values()))) + " |",
        "|---|" + "---:|" * len(next(iter(speed.values()))),
        *(f"| {name} | " + " | ".join(f"{value:,.4g}" for value in row.values()) + " |" for name, row in speed.items()),
        "",
        *_of_floor(figures["prefill floor"], speed["cold"]["prefill, s"]),
        f"Seconds: {', '.join(f'{name} {seconds:.1f}' for name, seconds in figures['seconds'].items())}.",
    ]
    return "\n".join(lines)


def _of_floor(floor: Mapping[str, float], prefill_s: float) -> list[str]:
    if not floor:
        return []
    return [
        f"The GEMMs of the uncached prompts ({floor['FLOPs'] / 1e12:.1f} TFLOP) take {floor['s']:.3f} s at the "
        f"{floor['TFLOP/s']:.0f} TFLOP/s of a large one: prefill is at {floor['s'] / prefill_s:.2f} of that.",
        "",
    ]


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


def measure(scale: Scale) -> dict[str, Any]:
    """Return all results."""
    with stopwatch() as building:
        model = random_model(scale.shape.fields, torch.bfloat16)
    with stopwatch() as on_logits:
        logits = compare_logits(scale, model)
    with stopwatch() as on_speed:
        speed = measure_speed(scale, model)
    floor = prefill_floor(scale, model)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with stopwatch() as on_tokens:
        tokens = compare_tokens(scale)
    seconds = {"building": building[0], "logits": on_logits[0], "speed": on_speed[0], "tokens": on_tokens[0]}
    return {
        "machine": describe_machine(),
        "logits": logits,
        "tokens": tokens,
        "speed": speed,
        "prefill floor": floor,
        "seconds": seconds,
    }


def main() -> int:
    """Measure, print Markdown and write JSON; return 1 unless logits and tokens agree as required."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", choices=SCALES, default="8b", help="shapes named tiny run on any machine; default: %(default)s"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    if arguments.shape in LARGE_SHAPES and not torch.cuda.is_available():
        parser.error("needs a CUDA device, or --shape tiny")
    with quiet_libraries(), own_warnings_hidden():
        figures = measure(SCALES[arguments.shape])
    print(table(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    logits, tokens = figures["logits"], figures["tokens"]
    is_right = logits["holds"] and logits["lost states would show"] and not tokens["requests that differ"]
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
