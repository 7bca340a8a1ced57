"""Measure the time to sample one token per request, with and without top-k and top-p.

    PYTHONPATH=. python3 benchmarks/sampling.py [--rows N ...] [--vocabularies N ...] [--json FILE]

Times are medians of one launch in a CUDA graph. The logits are normally distributed in fp32, so the distributions are
flat and top-p keeps most tokens. For comparison, the script measures argmax, which greedy requests use, and the torch
reference, which sorts the vocabulary. Sampled tokens are compared with those of the reference.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from measuring.graph_timing import launch_us
from measuring.machine import describe_machine

from megatron_mamba_cache.kernels.sampling.greedy_draws import greedy_tokens
from megatron_mamba_cache.kernels.sampling.row_tiles import SamplingRows
from megatron_mamba_cache.kernels.sampling.sampling import sample_tokens, sample_tokens_ref

SETTINGS = {"all tokens": (0, 0.0), "top-p": (0, 0.95), "top-k": (50, 0.0), "both": (50, 0.95)}
"""Top-k and top-p."""


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds to sample one token for each of some requests.

    Args:
        drawn_us: Time by sampling settings.
        num_other: Number of requests, over all settings, whose token differs from that of the reference.
    """

    vocab_size: int
    num_rows: int
    sampled_us: dict[str, float]
    argmax_us: float
    twin_us: float
    num_other: int


def times_of(num_rows: int, vocab_size: int) -> Times:
    """Measure `num_rows` requests with one vocabulary size."""
    generator = torch.Generator("cuda").manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab_size, device="cuda", generator=generator)
    uniforms = torch.rand(num_rows, device="cuda", dtype=torch.float64, generator=generator)
    sampled_us, num_other = {}, 0
    for name, (top_k, top_p) in SETTINGS.items():
        settings = (torch.full((num_rows,), value, device="cuda") for value in (1.0, top_k, top_p))
        rows, any_cut = SamplingRows(logits, *settings), name != "all tokens"
        sampled_us[name] = launch_us([lambda rows=rows, cut=any_cut: sample_tokens(rows, uniforms, any_cut=cut)], 100)
        tokens = sample_tokens(rows, uniforms, any_cut=any_cut)
        num_other += int((tokens != sample_tokens_ref(rows, uniforms)).sum())
    argmax_us = launch_us([lambda: greedy_tokens(logits)], 20)
    twin_us = launch_us([lambda: sample_tokens_ref(rows, uniforms)], 3000)
    return Times(vocab_size, num_rows, sampled_us, argmax_us, twin_us, num_other)


def table(found: Sequence[Times]) -> str:
    """Return the times as Markdown."""
    lines = [
        "| vocabulary | requests | argmax, µs | "
        + " | ".join(f"{name}, µs" for name in SETTINGS)
        + " | twin, µs | other |",
        "|---:" * (5 + len(SETTINGS)) + "|",
    ]
    for times in found:
        cells = " | ".join(f"{times.sampled_us[name]:.0f}" for name in SETTINGS)
        lines.append(
            f"| {times.vocab_size:,} | {times.num_rows} | {times.argmax_us:.0f} | {cells} | {times.twin_us:,.0f} | "
            f"{times.num_other} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256], metavar="N")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[131072, 256000], metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    found = [times_of(rows, vocabulary) for vocabulary in arguments.vocabularies for rows in arguments.rows]
    print(table(found))
    if arguments.json:
        figures = {"machine": describe_machine(), "times": [asdict(times) for times in found]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
