"""`--drafter mtp` drafts with the head of a model directory, and is refused in one line without one."""

import json
from pathlib import Path

import pytest

from tests.command_line.command_runs import run_here
from tests.models.checkpoint_edits import tensors_of, write_tensors
from tests.models.mtp_heads import head_tensors
from tests.models.tiny_checkpoints import tiny_checkpoint

DRAFTS = ("--drafter", "mtp", "--num-speculative-tokens", 2, "--no-adaptive-drafts")
GREEDY = ("--top-k", 1, "--dtype", "fp32")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Write a file with one prompt."""
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"prompt_tokens": list(range(1, 90)), "num_tokens_to_generate": 20}))
    return path


@pytest.mark.parametrize("name", ["qwen3_5_moe-0", "nemotron_h_moe-0"])
def test_generate_with_a_head_drafts_and_keeps_the_tokens(
    name: str, lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, directory, output = tiny_checkpoint(name), tmp_path / "model", tmp_path / "out.json"
    case.write(case.model(), directory)
    write_tensors(directory, tensors_of(directory) | head_tensors(case.config))
    replies, num_drafts = [], []
    for drafts in ((), DRAFTS):
        flags = ("--hf-model", directory, "--prompts", lines, *GREEDY, *drafts, "--output-path", output)
        finished = run_here(capsys, *flags)
        assert finished.status == 0, finished.stderr
        replies.append(json.loads(output.read_text())["requests"][0]["generated_tokens"])
        num_drafts.append("drafts" in finished.stdout)
    assert replies[0] == replies[1]
    assert num_drafts == [False, True]


def test_models_without_a_head_are_refused(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = tiny_checkpoint("qwen3_5-0")
    case.write(case.model(), tmp_path / "model")
    refusals = {
        ("--hf-model", tmp_path / "model"): "config.json: the model has no MTP layers; drafts need another drafter",
        ("--random-model",): "--drafter mtp needs a Hugging Face directory with MTP layers",
    }
    for model, message in refusals.items():
        capsys.readouterr()  # transformers logs while it writes
        finished = run_here(capsys, *model, "--prompts", lines, *GREEDY, *DRAFTS)
        assert finished.status == 2 and message in finished.stderr
        assert finished.stderr.count("\n") == 1
