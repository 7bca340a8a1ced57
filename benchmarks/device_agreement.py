"""Does the example write the same tokens on a GPU as on a CPU?

Runs examples/generate.py in fp32 once on each device, with the random model, and compares the tokens of every request.
Where two differ, a float64 model that shares no code with the package says whether its best two tokens were closer than
1e-5 there: rounding may then choose either.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARGIN = 1e-5


def main() -> int:
    """Print the comparison; exit 1 if a token differs that the margin does not explain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    as_json = parser.parse_args().json
    runs = {device: run_example(device) for device in ("cpu", "cuda")}
    report = compare(runs["cpu"], runs["cuda"])
    print(json.dumps(report, indent=2) if as_json else table(report))
    return 1 if report["requests_that_differ"] else 0


def run_example(device: str) -> dict[str, Any]:
    """Return the JSON that the example writes on a device."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.json"
        script = [sys.executable, str(ROOT / "examples" / "generate.py")]
        flags = ["--random-model", "--device", device, "--dtype", "fp32", "--top-k", "1", "--output-path", str(output)]
        subprocess.run([*script, *flags], check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(output.read_text())
        return result


def compare(cpu: dict[str, Any], cuda: dict[str, Any]) -> dict[str, Any]:
    """Return what was compared and which requests differ without the margin's excuse."""
    pairs = list(zip(cpu["requests"], cuda["requests"], strict=True))
    unequal = [(ours, theirs) for ours, theirs in pairs if ours["generated_tokens"] != theirs["generated_tokens"]]
    return {
        "requests": len(pairs),
        "generated_tokens": sum(len(ours["generated_tokens"]) for ours, _ in pairs),
        "equal_requests": len(pairs) - len(unequal),
        "ended_at_a_margin_below_1e-5": sum(_is_a_tie(*pair) for pair in unequal),
        "requests_that_differ": [ours["request_id"] for ours, theirs in unequal if not _is_a_tie(ours, theirs)],
        "cpu": _speed(cpu),
        "cuda": _speed(cuda),
    }


def _speed(run: dict[str, Any]) -> dict[str, float]:
    summary = run["summary"]
    return {key: summary[key] for key in ("tokens_per_second", "cached_tokens", "computed_tokens", "steps")}


def _is_a_tie(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    sys.path.insert(0, str(ROOT))
    from megatron_mamba_cache.models.random_hybrid import random_hybrid_model
    from tests.oracle import HybridOracle

    oracle = HybridOracle.from_megatron(random_hybrid_model())
    checks = [oracle.check_greedy(r["prompt_tokens"], r["generated_tokens"], MARGIN) for r in (ours, theirs)]
    return all(check.first_mismatch is None for check in checks)


def table(report: dict[str, Any]) -> str:
    """Return the report as a Markdown table."""
    rows = [(name, value) for name, value in report.items() if not isinstance(value, dict)]
    for device in ("cpu", "cuda"):
        rows += [(f"{device} {name}", value) for name, value in report[device].items()]
    return "\n".join(["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


if __name__ == "__main__":
    sys.exit(main())
