"""The flags --cached-state-dtype and --kv-cache-dtype with tiers and drafts, and the comparison of outputs."""

import json
from pathlib import Path

import pytest

from megatron_mamba_cache.command_line import generation
from megatron_mamba_cache.command_line.arguments import command_parser
from megatron_mamba_cache.command_line.cache_flags import config_of
from megatron_mamba_cache.command_line.results import Difference
from tests.command_line.command_runs import run_here

PROMPT = "def add(a, b):\n    return a + b\n" * 12
MEMORY = ["--cache-gb", "0.1", "--host-cache-gb", "0.1"]


def test_cached_state_dtype_flag_sets_the_field_of_the_cache_config() -> None:
    for command in ("generate", "serve"):
        parsed = command_parser().parse_args([command, "--cached-state-dtype", "int8"])
        assert config_of(parsed).cached_state_dtype == "int8"
        assert config_of(command_parser().parse_args([command])).cached_state_dtype == "live"


@pytest.mark.parametrize("drafts", [[], ["--num-speculative-tokens", "2"]])
@pytest.mark.parametrize("memory", [[], MEMORY])
def test_generate_reuses_quantized_states_with_tiers_and_drafts(
    memory: list[str], drafts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("prompts.jsonl", "out.json")}
    lines = [{"prompt": PROMPT + end, "num_tokens_to_generate": 3} for end in ("a", "bc", "def")]
    files["prompts.jsonl"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--cached-state-dtype", "int8", *memory, *drafts]
    finished = run_here(
        capsys, "--random-model", "--prompts", files["prompts.jsonl"], "--output-path", files["out.json"], *flags
    )
    assert finished.status == 0, finished.stderr
    summary = json.loads(files["out.json"].read_text())["summary"]
    assert summary["cached_tokens"] >= len(PROMPT) // 64 * 64


def test_ssm_state_dtype_flag_sets_the_config_field() -> None:
    for command in ("generate", "serve"):
        assert config_of(command_parser().parse_args([command, "--ssm-state-dtype", "fp16"])).ssm_state_dtype == "fp16"
        assert config_of(command_parser().parse_args([command])).ssm_state_dtype == "fp32"


def test_kv_cache_dtype_flag_sets_the_config_field() -> None:
    for command in ("generate", "serve"):
        assert config_of(command_parser().parse_args([command, "--kv-cache-dtype", "fp8"])).kv_cache_dtype == "fp8"
        assert config_of(command_parser().parse_args([command])).kv_cache_dtype == "auto"


def test_generate_reuses_fp8_keys_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    lines = [{"prompt": PROMPT + end, "num_tokens_to_generate": 3} for end in ("a", "bc")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--kv-cache-dtype", "fp8", *MEMORY]
    finished = run_here(capsys, "--random-model", "--prompts", prompts, "--output-path", out, *flags)
    assert finished.status == 0, finished.stderr
    assert json.loads(out.read_text())["summary"]["cached_tokens"] > 0


def test_different_outputs_after_quantization_are_reported_without_failing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "first_difference", lambda *_: Difference(0, 1, 2, 3))
    flags = ["--random-model", "--num-tokens-to-generate", "2"]
    finished = run_here(capsys, *flags, "--cached-state-dtype", "int8")
    assert finished.status == 0 and "outputs differ, which can happen after a cached state of 8 bits" in finished.stdout
    assert run_here(capsys, *flags, "--dtype", "fp32").status == 1
