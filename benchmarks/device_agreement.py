"""Check that the example generates the same tokens on a GPU and on a CPU.

The script runs examples/generate.py in fp32 with greedy decoding on each device: with the random model, with the
shipped model, and with the shipped model and drafts. It compares the tokens of every request. If two replies differ, a
float64 model that shares no code with the package computes the logits at that position. If its two best logits are
within 1e-5, rounding can select either token, so the difference is accepted.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
MARGIN = 1e-5
RUNS = {"random model": ["--random-model"], "shipped model": [], "4 drafts": ["--num-speculative-tokens", "4"]}


def main() -> int:
    """Print the comparisons; exit with status 1 if a difference is not explained by rounding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    as_json = parser.parse_args().json
    with ThreadPoolExecutor() as pool:  # each run is a separate process
        started = {
            name: [pool.submit(run_example, device, flags) for device in ("cpu", "cuda")]
            for name, flags in RUNS.items()
        }
    reports = {
        name: compare(*(run.result() for run in pair), is_random="--random-model" in RUNS[name])
        for name, pair in started.items()
    }
    print(json.dumps(reports, indent=2) if as_json else table(reports))
    return 1 if any(report["requests that differ"] for report in reports.values()) else 0


def run_example(device: str, own_flags: list[str]) -> dict[str, Any]:
    """Run the example on a device and return its JSON output."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        script = [sys.executable, str(ROOT / "examples" / "generate.py")]
        flags = ["--device", device, "--dtype", "fp32", "--top-k", "1", "--output-path", str(output)]
        subprocess.run([*script, *flags, *own_flags], check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(output.read_text())
        return result


def compare(cpu: dict[str, Any], cuda: dict[str, Any], *, is_random: bool) -> dict[str, Any]:
    """Compare two runs of the example; the result lists the requests whose difference rounding does not explain."""
    pairs = list(zip(cpu["requests"], cuda["requests"], strict=True))
    unequal = [pair for pair in pairs if pair[0]["generated_tokens"] != pair[1]["generated_tokens"]]
    oracle = _oracle(is_random=is_random) if unequal else None
    ties = [_is_a_tie(oracle, *pair) for pair in unequal]
    return {
        "requests": len(pairs),
        "generated tokens": sum(len(ours["generated_tokens"]) for ours, _ in pairs),
        "equal requests": len(pairs) - len(unequal),
        f"ended at a margin below {MARGIN:g}": sum(ties),
        "requests that differ": [ours["request_id"] for (ours, _), tie in zip(unequal, ties, strict=True) if not tie],
        **{f"{key}, cpu": cpu["summary"][key] for key in ("cached_tokens", "computed_tokens", "steps")},
        **{f"{key}, cuda": cuda["summary"][key] for key in ("cached_tokens", "computed_tokens", "steps")},
    }


def _oracle(*, is_random: bool) -> Any:
    sys.path.insert(0, str(ROOT))
    from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL
    from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
    from megatron_mamba_cache.models.random_hybrid import random_hybrid_model
    from tests.oracle import HybridOracle

    model = random_hybrid_model() if is_random else load_hugging_face(SHIPPED_MODEL, torch.float32).model
    return HybridOracle.from_megatron(model)


def _is_a_tie(oracle: Any, ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    checks = [oracle.check_greedy(r["prompt_tokens"], r["generated_tokens"], MARGIN) for r in (ours, theirs)]
    return all(check.first_mismatch is None for check in checks)


def table(reports: dict[str, dict[str, Any]]) -> str:
    """Return the reports as a Markdown table with one column per report."""
    names = list(next(iter(reports.values())))
    rows = [f"| {name} | {' | '.join(str(report[name]) for report in reports.values())} |" for name in names]
    return "\n".join([f"| | {' | '.join(reports)} |", f"|---{'|---' * len(reports)}|", *rows])


if __name__ == "__main__":
    sys.exit(main())
