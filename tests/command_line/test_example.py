"""The example, as a stranger runs it: with --run-slow without arguments, else with shorter replies."""

import json
import re
from pathlib import Path

import pytest

from tests.command_line.command_runs import REPOSITORY, run_process
from tests.docs.blocks import blocks_of, matches

COMPILES = re.compile(r"WARNING: (\w+ compiles .*, once per machine \.\.\.|\.\.\. done after \d+ s)")


@pytest.mark.parametrize(
    "flags",
    [pytest.param(("--num-tokens-to-generate", 8), marks=pytest.mark.long), pytest.param((), marks=pytest.mark.slow)],
    ids=["short replies", "as written"],
)
def test_example_reuses_cached_prefixes_without_changing_outputs(flags: tuple[object, ...], tmp_path: Path) -> None:
    finished = run_process(REPOSITORY / "examples" / "generate.py", "--output-path", "out.json", *flags, cwd=tmp_path)
    assert finished.status == 0, finished.stderr
    assert not [line for line in finished.stderr.splitlines() if not COMPILES.fullmatch(line)]
    assert "outputs identical: all 12 requests" in finished.stdout
    printed = next(block for block in blocks_of(REPOSITORY / "README.md") if block.kind == "prints")
    text = without_counts_of_replies(printed.text) if flags else printed.text
    assert matches(text, finished.stdout, times_vary=True)
    assert re.search(r"skipped \d+ of \d+ prompt tokens \(\S+ %\)", printed.text)[0] in finished.stdout
    summary = json.loads((tmp_path / "out.json").read_text())["summary"]
    assert summary["outputs_identical"] is True
    assert summary["cached_tokens"] > summary["prompt_tokens"] / 2
    assert summary["computed_tokens"] < summary["without_cache"]["computed_tokens"] / 2
    later = summary["later_turns"]
    assert later["cached_tokens"] >= 0.8 * later["prompt_tokens"] > 0
    assert f"skipped {later['cached_tokens']} of {later['prompt_tokens']} prompt tokens" in finished.stdout
    assert f"skipped {summary['cached_tokens']} of {summary['prompt_tokens']} prompt tokens" in finished.stdout


def without_counts_of_replies(text: str) -> str:
    """Return what the README says is printed, with the line left open that depends on how long replies are."""
    open_line, count = re.subn(r"^skipped .*generated .*$", "...", text, flags=re.M)
    assert count == 1
    return open_line
