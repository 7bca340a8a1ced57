"""`--drafter mtp` drafts with the head of a model directory, and is refused in one line without one.

`--drafter auto`, with which a server starts, uses a head that is supported, and otherwise prompt lookup.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mamba_cache.command_line.arguments import command_parser, with_auto_drafts
from megatron_mamba_cache.command_line.ready_model import ReadyModel, WeightFlags, drafter_maker
from megatron_mamba_cache.config import CacheConfig
from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from megatron_mamba_cache.speculation.prompt_lookup import AutoDrafter, PromptLookupDrafter
from tests.command_line.command_runs import Finished, run_here
from tests.models.checkpoint_edits import set_fields, tensors_of, write_tensors
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
        ("--random-model",): "--drafter mtp needs a model with MTP layers; give it with --hf-model or --load",
    }
    for model, message in refusals.items():
        capsys.readouterr()  # transformers logs while it writes
        finished = run_here(capsys, *model, "--prompts", lines, *GREEDY, *DRAFTS)
        assert finished.status == 2 and message in finished.stderr
        assert finished.stderr.count("\n") == 1


def with_head(name: str, directory: Path) -> dict[str, Any]:
    """Write a checkpoint with a head; return its tensors."""
    case = tiny_checkpoint(name)
    case.write(case.model(), directory)
    tensors = tensors_of(directory) | head_tensors(case.config)
    write_tensors(directory, tensors)
    return tensors


def reports_drafts(finished: Finished) -> bool:
    return " drafts (" in finished.stdout or "nothing was drafted" in finished.stdout


def test_auto_drafts_with_a_supported_head_only(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, output = tmp_path / "model", tmp_path / "out.json"
    tensors = with_head("nemotron_h_moe-0", directory)

    def run(*flags: object) -> Finished:
        capsys.readouterr()
        return run_here(capsys, "--hf-model", directory, "--prompts", lines, *GREEDY, *flags, "--output-path", output)

    expected = run("--num-speculative-tokens", 0)
    reply = json.loads(output.read_text())["requests"][0]["generated_tokens"]
    assert not reports_drafts(expected)
    found = run("--drafter", "auto")
    assert found.status == 0 and reports_drafts(found) and "MTP" not in found.stderr
    assert json.loads(output.read_text())["requests"][0]["generated_tokens"] == reply
    set_fields(directory, mtp_hybrid_override_pattern="*ME")
    unsupported = run("--drafter", "auto")
    assert unsupported.status == 0 and not reports_drafts(unsupported)
    print(unsupported.stderr)
    assert unsupported.stderr.count("MTP") == unsupported.stderr.count("'*ME' are not supported") == 1
    set_fields(directory, mtp_hybrid_override_pattern="*E")
    write_tensors(directory, {name: tensor for name, tensor in tensors.items() if "eh_proj" not in name})
    damaged = run("--drafter", "auto")
    assert damaged.status == 2 and "mtp.layers.0.eh_proj.weight" in damaged.stderr
    assert damaged.stderr.count("\n") == 1


def test_memory_of_a_head_is_expected_before_the_weights_are_loaded(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal of a budget that is too small names the same size for each drafter that uses the head."""
    directory = tmp_path / "model"
    tensors = with_head("nemotron_h_moe-0", directory)

    def refusal(*flags: object) -> str:
        capsys.readouterr()
        small = ("--cache-gb", 1e-6)
        finished = run_here(capsys, "--hf-model", directory, "--prompts", lines, *GREEDY, *small, *flags)
        assert finished.status == 2 and finished.stderr.count("\n") == 1, finished.stderr
        return finished.stderr

    monkeypatch.setattr("megatron_mamba_cache.command_line.ready_model.load_weights", None)
    drafts = ("--num-speculative-tokens", 5)
    expected, without = refusal("--drafter", "mtp", *drafts), refusal(*drafts)
    assert expected != without
    assert refusal("--drafter", "auto", *drafts) == refusal("--drafter", "auto") == expected
    no_drafts = ("--num-speculative-tokens", 0)
    assert refusal("--drafter", "auto", *no_drafts) == refusal(*no_drafts)
    write_tensors(directory, {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")})
    assert refusal("--drafter", "auto", *drafts) == without


def test_a_server_starts_with_auto(tmp_path: Path) -> None:
    with_head("nemotron_h_moe-0", tmp_path)
    model = load_hugging_face(tmp_path, torch.float32, mtp="auto")

    def started(*flags: str, has_head: bool = True) -> tuple[str, int | None, Any]:
        arguments = command_parser().parse_args(["serve", *flags])
        ready = ReadyModel(model.model, ByteTokenizer(256), "", "fp32", model.mtp if has_head else None)
        found = with_auto_drafts(arguments, has_head=has_head)
        drafter = drafter_maker(found, ready, lambda _shape, _length: {})(CacheConfig(max_requests=2))
        return WeightFlags.of(arguments).mtp, found.num_speculative_tokens, type(drafter)

    assert started() == ("auto", 5, AutoDrafter)
    assert started(has_head=False) == ("auto", 0, PromptLookupDrafter)
    assert started("--num-speculative-tokens", "3") == ("auto", 3, AutoDrafter)
    assert started("--num-speculative-tokens", "3", has_head=False) == ("auto", 3, PromptLookupDrafter)
    off = ("--num-speculative-tokens", "0")
    assert started(*off, has_head=False) == ("none", 0, PromptLookupDrafter)
    assert started("--tensor-model-parallel-size", "2") == ("auto", 5, AutoDrafter)
    assert started("--drafter", "prompt-lookup", *off, has_head=False)[0] == "none"
