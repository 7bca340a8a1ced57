"""The generate command over model directories."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.command_line import model_choice, ready_model
from megatron_mamba_cache.command_line.main import main
from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
from megatron_mamba_cache.models.checkpoints.megatron_checkpoint import (
    load_megatron_checkpoint,
    save_megatron_checkpoint,
)
from megatron_mamba_cache.models.drafting import draft_model
from megatron_mamba_cache.speculation.prompt_lookup import PromptLookupDrafter
from tests.command_line.command_runs import REPOSITORY, Finished, run_here, run_process
from tests.command_line.tiny_directories import FAMILIES, save_model, save_tokenizer
from tests.models.tokenizer_kinds import save_kind, size_of
from tests.models.training_checkpoints import write_training_checkpoint
from tests.server.running_server import made_server

BLOCK = "--inference-dynamic-batching-block-size"
LONG = [(7 * index) % 500 for index in range(200)]
LINES = [
    {"prompt_tokens": LONG, "session": 1, "num_tokens_to_generate": 12},
    {"prompt_tokens": [*LONG, 3, 1, 4], "session": 1, "num_tokens_to_generate": 12},
    {"prompt_tokens": [5, 6, 7]},
]
GREEDY = ("--top-k", 1, "--dtype", "fp32")
TOLERANCE = 1e-4


@pytest.fixture
def lines_file(tmp_path: Path) -> Path:
    """Write the lines of token ids."""
    return write_lines(tmp_path, LINES)


@pytest.fixture
def nemotron(tmp_path: Path) -> Path:
    """Write a NemotronH directory without a tokenizer."""
    save_model("nemotron_h", tmp_path / "model")
    return tmp_path / "model"


def write_lines(folder: Path, lines: list[dict[str, Any]]) -> Path:
    file = folder / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def ends_with_one_line(finished: Finished, *words: str) -> bool:
    is_one_line = finished.status == 2 and finished.stderr.count("\n") == 1
    return is_one_line and all(word in finished.stderr for word in words)


@pytest.mark.parametrize("command", ["generate", "serve"])
@pytest.mark.parametrize("format_flag", ["--hf-model", "--load"])
def test_budget_that_is_too_small_is_refused_before_loading(
    command: str, format_flag: str, nemotron: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if format_flag == "--load":
        loaded = load_hugging_face(nemotron, torch.float32)
        save_megatron_checkpoint(loaded.model, loaded.architecture, tmp_path / "saved")
        weights = next((tmp_path / "saved").rglob("*.distcp"))
    else:
        weights = nemotron / "model.safetensors"
    weights.write_bytes(b"no weights")
    directory = nemotron if format_flag == "--hf-model" else tmp_path / "saved"
    flags = [format_flag, str(directory), *(["--port", "0"] if command == "serve" else [])]
    flags += ["--prompts", str(write_lines(tmp_path, LINES))] if command == "generate" else []
    capfd.readouterr()  # NCCL may say something where a checkpoint is written
    for budget, word in (("1e-6", "set --cache-gb to"), ("1", "weights" if format_flag == "--load" else "safetensors")):
        status = main([command, *flags, "--cache-gb", budget])
        printed = capfd.readouterr().err
        assert status == 2 and printed.count("\n") == 1 and word in printed, printed


@pytest.mark.parametrize("draft_family", ["nemotron_h", "bamba"])
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_budget_error_includes_room_for_the_draft_model(
    command: str, draft_family: str, nemotron: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_model(draft_family, tmp_path / "draft")
    for directory in (nemotron, tmp_path / "draft"):
        (directory / "model.safetensors").write_bytes(b"no weights")
    flags = ["--hf-model", str(nemotron), "--num-speculative-tokens", "2"]
    flags += ["--drafter", "draft-model", "--draft-hf-model", str(tmp_path / "draft"), "--cache-gb"]
    prompts = ["--prompts", str(write_lines(tmp_path, LINES))]
    flags = [command, *(["--port", "0"] if command == "serve" else prompts), *flags]
    capfd.readouterr()  # transformers logs while it writes
    assert main([*flags, "1e-6"]) == 2
    printed = capfd.readouterr().err
    named = re.search(r"set --cache-gb to (\S+) or more", printed)
    assert printed.count("\n") == 1 and named is not None, printed
    assert ("drafter's own cache" in printed) is not ("lower --max-model-len" in printed), printed
    for budget, word in ((float(named[1]) * 0.99, "set --cache-gb to"), (float(named[1]), "safetensors")):
        assert main([*flags, str(budget)]) == 2
        printed = capfd.readouterr().err
        assert printed.count("\n") == 1 and word in printed, printed


@pytest.mark.parametrize("family", FAMILIES)
def test_token_ids_without_a_tokenizer_match_transformers(
    family: str, tmp_path: Path, lines_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(family, tmp_path / "model")
    output = tmp_path / "out.json"
    flags = ("--hf-model", tmp_path / "model", "--prompts", lines_file, *GREEDY, "--output-path", output)
    finished = run_here(capsys, *flags)
    assert finished.status == 0, finished.stderr
    document = json.loads(output.read_text())
    for line, request in zip(LINES, document["requests"], strict=True):
        assert "error" not in request and request["prompt_tokens"] == line["prompt_tokens"]
        assert len(request["generated_tokens"]) == line.get("num_tokens_to_generate", 64)
        assert request["text"] == " ".join(map(str, request["generated_tokens"]))
        assert shortfall(model, request["prompt_tokens"], request["generated_tokens"]) <= TOLERANCE
    block = 72 if getattr(model.config, "mamba_chunk_size", None) == 24 else 64
    assert f"M {'Gated DeltaNet' if 'qwen' in family else 'Mamba'}, * attention" in finished.stdout
    assert document["requests"][1]["cached_tokens"] == 200 // block * block
    assert document["summary"]["later_turns"] == {"prompt_tokens": 203, "cached_tokens": 200 // block * block}


@torch.no_grad()
def shortfall(model: Any, prompt: list[int], generated: list[int]) -> float:
    """Return the largest difference between the highest logit and the logit of the chosen token."""
    logits = model(torch.tensor([prompt + generated]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
    return float((logits.max(dim=1).values - chosen).max())


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", *(["auto"] if torch.cuda.is_available() else [])])
def test_example_runs_a_directory_as_the_readme_describes(
    device: str, tmp_path: Path, lines_file: Path, nemotron: Path
) -> None:
    flags = ("--hf-model", nemotron, "--prompts", lines_file, *GREEDY, "--device", device, "--output-path", "out.json")
    finished = run_process(REPOSITORY / "examples" / "generate.py", *flags, cwd=tmp_path)
    assert (finished.status, finished.stderr) == (0, "")
    document = json.loads((tmp_path / "out.json").read_text())
    assert len(document["requests"]) == len(LINES)
    assert device == "auto" or document["summary"]["device"] == device


def test_model_directory_runs_in_bf16_and_without_cache(
    tmp_path: Path, lines_file: Path, nemotron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--hf-model", nemotron, "--prompts", lines_file, "--num-tokens-to-generate", 2)
    assert run_here(capsys, *flags, "--dtype", "bf16", BLOCK, 32).status == 0
    finished = run_here(capsys, *flags, "--no-prefix-caching")
    assert finished.status == 0 and "prefix caching is off" in finished.stdout
    assert ends_with_one_line(run_here(capsys, *flags, BLOCK, 40), BLOCK, "chunk size 16")


def test_megatron_checkpoint_matches_its_source_directory(
    tmp_path: Path, lines_file: Path, nemotron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_hugging_face(nemotron, torch.float32)
    save_megatron_checkpoint(loaded.model, loaded.architecture, tmp_path / "saved")
    write_training_checkpoint(loaded.model, loaded.architecture, tmp_path / "run")
    tokens = []
    for source in (("--hf-model", nemotron), ("--load", tmp_path / "saved"), ("--load", tmp_path / "run")):
        finished = run_here(capsys, *source, "--prompts", lines_file, *GREEDY, "--output-path", tmp_path / "out.json")
        assert finished.status == 0, finished.stderr
        document = json.loads((tmp_path / "out.json").read_text())
        tokens.append([request["generated_tokens"] for request in document["requests"]])
    assert tokens[0] == tokens[1] == tokens[2]


def test_text_prompt_uses_the_tokenizer_of_the_directory(
    tmp_path: Path, nemotron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = save_tokenizer(nemotron)
    file = write_lines(tmp_path, [{"prompt": "def parse(line):\n    return"}, {"prompt_tokens": [1, 2, 3]}])
    finished = run_here(capsys, "--hf-model", nemotron, "--prompts", file, "--output-path", tmp_path / "out.json")
    assert finished.status == 0, finished.stderr
    text, ids = json.loads((tmp_path / "out.json").read_text())["requests"]
    assert text["prompt_tokens"] == tokenizer("def parse(line):\n    return")["input_ids"]
    assert text["text"] == tokenizer.decode(text["generated_tokens"], skip_special_tokens=True)
    assert ids["prompt_tokens"] == [1, 2, 3]
    assert "request 0\n  | def parse(line):\n  >     return" in finished.stdout


def test_reply_text_is_what_its_tokens_add_to_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_kind(tmp_path, "SentencePiece BPE", "begin")
    save_model("bamba", tmp_path, size_of(tmp_path))
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompts = [{"prompt": f"The lazy dog {number}, größer"} for number in range(12)]
    file, out = write_lines(tmp_path, prompts), tmp_path / "out.json"
    flags = ("--num-tokens-to-generate", 8, "--temperature", 2, "--top-k", 0)
    finished = run_here(capsys, "--hf-model", tmp_path, "--prompts", file, *flags, "--output-path", out)
    assert finished.status == 0, finished.stderr
    texts = []
    for request in json.loads(out.read_text())["requests"]:
        head, tokens = backend.decode(request["prompt_tokens"]), request["prompt_tokens"] + request["generated_tokens"]
        assert head + request["text"] == backend.decode(tokens)
        texts.append(request["text"])
    assert any(text.startswith(" ") for text in texts)


def test_generation_stops_at_the_end_of_text_token(
    tmp_path: Path, lines_file: Path, nemotron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer(nemotron)
    flags = ("--hf-model", nemotron, "--prompts", lines_file, *GREEDY, "--output-path", tmp_path / "out.json")

    def generated() -> list[int]:
        assert run_here(capsys, *flags).status == 0
        tokens: list[int] = json.loads((tmp_path / "out.json").read_text())["requests"][2]["generated_tokens"]
        return tokens

    free = generated()
    (nemotron / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[5], 0]}))
    assert generated() == free[: free.index(free[5]) + 1]
    unseen = next(token for token in range(512) if token not in free)
    (nemotron / "generation_config.json").write_text(json.dumps({"eos_token_id": [unseen, free[5]]}))
    assert generated() == free[: free.index(free[5]) + 1]


def test_error_for_a_text_prompt_without_a_tokenizer_names_the_line(
    tmp_path: Path, nemotron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path, [{"prompt_tokens": [1]}, {"prompt": "one"}])
    finished = run_here(capsys, "--hf-model", nemotron, "--prompts", file)
    assert ends_with_one_line(finished, f"{file}, line 2 (request_id 1)", f"{nemotron} has no tokenizer")
    assert ends_with_one_line(run_here(capsys, "--hf-model", nemotron), "has no tokenizer", "--prompts")


def test_tokenizer_of_another_model_is_refused(nemotron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tokenizer(nemotron, vocabulary=513)
    finished = run_here(capsys, "--hf-model", nemotron)
    files = (f"{nemotron}/tokenizer.json", f"{nemotron}/config.json")
    assert ends_with_one_line(finished, "--hf-model: ", *files, "512", "is 512")


def test_unloadable_directory_exits_with_a_one_line_error(
    tmp_path: Path, nemotron: Path, lines_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (nemotron / "model.safetensors").write_bytes(b"no tensors")
    prompts = ("--prompts", lines_file)
    assert ends_with_one_line(run_here(capsys, "--hf-model", nemotron, *prompts), "--hf-model: ", "model.safetensors")
    assert ends_with_one_line(run_here(capsys, "--load", nemotron, *prompts), "--load: ", str(nemotron))
    absent = tmp_path / "absent"
    for flag in ("--hf-model", "--load"):
        assert ends_with_one_line(run_here(capsys, flag, absent, *prompts), f"{flag}: ", str(absent))


def test_shipped_model_is_the_default_if_its_files_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_choice, "SHIPPED_MODEL", tmp_path / "shipped")
    few = ("--num-tokens-to-generate", 1, "--output-path", tmp_path / "out.json")
    assert "built-in random hybrid model" in run_here(capsys, *few).stdout
    save_model("nemotron_h", tmp_path / "shipped")
    save_tokenizer(tmp_path / "shipped")
    finished = run_here(capsys, *few)
    assert finished.status == 0, finished.stderr
    assert finished.stdout.startswith("the small model of Python source that ships, layers M-*M")
    assert "outputs identical: all 12 requests" in finished.stdout
    later = json.loads((tmp_path / "out.json").read_text())["summary"]["later_turns"]
    assert later["cached_tokens"] >= 0.8 * later["prompt_tokens"] > 0
    assert "built-in random hybrid model" in run_here(capsys, *few, "--random-model").stdout


DRAFTS = ("--num-speculative-tokens", 4, "--drafter", "draft-model", "--draft-hf-model")


def test_unusable_draft_model_exits_with_a_one_line_error(
    tmp_path: Path, nemotron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other_vocabulary = run_here(capsys, "--random-model", *DRAFTS, nemotron)
    assert ends_with_one_line(other_vocabulary, "--draft-hf-model", "has 512 tokens", "has 256")
    missing = run_here(capsys, "--random-model", *DRAFTS, tmp_path / "nothing")
    assert ends_with_one_line(missing, "--draft-hf-model: ", "nothing is not a directory")


def test_draft_model_with_sharded_experts_is_refused_before_loading(
    tmp_path: Path,
    nemotron: Path,
    lines_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_model("granite", tmp_path / "draft")
    for directory in (nemotron, tmp_path / "draft"):
        (directory / "model.safetensors").write_bytes(b"no weights")
    monkeypatch.setattr(draft_model, "num_expert_ranks", lambda: 2)
    finished = run_here(
        capsys, "--hf-model", nemotron, "--prompts", lines_file, *DRAFTS, tmp_path / "draft", "--dtype", "fp32"
    )
    assert ends_with_one_line(
        finished, "--draft-hf-model ", "is an MoE model, and 2 expert-parallel ranks", "use a draft"
    )


def test_drafts_from_the_same_model_are_always_accepted(
    tmp_path: Path, lines_file: Path, nemotron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    flags = ("--hf-model", nemotron, "--prompts", lines_file, *GREEDY, "--output-path", output)
    tokens, summaries = [], []
    for more in ((), (*DRAFTS, nemotron), (*DRAFTS, nemotron, "--no-adaptive-drafts")):
        finished = run_here(capsys, *flags, *more)
        assert finished.status == 0, finished.stderr
        document = json.loads(output.read_text())
        tokens.append([request["generated_tokens"] for request in document["requests"]])
        summaries.append(document["summary"])
    assert tokens[0] == tokens[1] == tokens[2]
    _, tried, always = summaries
    for summary in (tried, always):
        assert summary["accepted_tokens"] == summary["draft_tokens"] > 0
    assert tried["draft_tokens"] < 30 and always["tokens_per_decode_row"] > 3  # each draft takes as long as a token


def test_draft_model_uses_cuda_graphs_when_the_model_does(
    lines_file: Path, nemotron: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    class NotedDrafter(PromptLookupDrafter):
        def __init__(self, model: Any, config: CacheConfig) -> None:
            super().__init__()
            counts.append(config.num_cuda_graphs)

    monkeypatch.setattr(ready_model, "DraftModelDrafter", NotedDrafter)
    for count in (0, 3):
        flags = ("--hf-model", nemotron, *DRAFTS, nemotron, "--cuda-graphs", count)
        finished = run_here(capsys, *flags, "--prompts", lines_file, *GREEDY)
        assert finished.status == 0, finished.stderr
        made_server(*map(str, flags)).backend._engine.close()
    half = len(counts) // 2
    assert half >= 2 and set(counts[:half]) == {0} and set(counts[half:]) == {3}


def test_draft_model_and_model_share_the_cache_budget(
    lines_file: Path, nemotron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--hf-model", nemotron, "--prompts", lines_file, *GREEDY, *DRAFTS, nemotron, "--max-model-len", 128)
    assert run_here(capsys, *flags, "--cache-gb", 0.02).status == 0
    cache_gb, parts = 0.0002, []
    while (finished := run_here(capsys, *flags, "--cache-gb", cache_gb)).status:
        assert ends_with_one_line(
            finished, f"cache_gb is {cache_gb:g} GiB (", " of it for this model), which cannot hold one"
        )
        parts += re.findall(r"\((\d+%) of it for this model\)", finished.stderr)
        (least,) = re.findall(r"set --cache-gb to ([\d.]+) or more", finished.stderr)
        assert float(least) > cache_gb
        cache_gb = float(least)
    assert "15%" in parts and len(parts) <= 3  # what the messages ask for is enough


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_default_to_the_checkpoints_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    save_model("nemotron_h", tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    fields = json.loads(config.read_text())
    for name in ("dtype", "torch_dtype"):
        fields.pop("dtype", None), fields.pop("torch_dtype", None)
        config.write_text(json.dumps(fields | {name: str(dtype).removeprefix("torch.")}))
        loaded = load_hugging_face(tmp_path / "theirs", None)
        assert {weight.dtype for weight in loaded.model.decoder.layers[0].mixer.in_proj.parameters()} == {dtype}
    save_megatron_checkpoint(loaded.model, loaded.architecture, tmp_path / "ours")
    assert load_megatron_checkpoint(tmp_path / "ours", None).model.config.params_dtype is dtype
