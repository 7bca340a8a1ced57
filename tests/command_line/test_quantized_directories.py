"""Commands on a quantized model directory run it and report the quantization."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_mamba_cache.command_line import ready_model
from megatron_mamba_cache.command_line.main import main
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from tests.command_line.command_runs import run_here
from tests.command_line.tiny_directories import save_model, save_tokenizer
from tests.models.quantized_kinds import KINDS
from tests.models.quantized_writer import quantize, write_plain
from tests.server.qwen_templates import QWEN_3_6
from tests.server.running_server import running_server

PROMPT = [(7 * index) % 500 for index in range(150)]
LOOK = {
    "type": "object",
    "properties": {"where": {"enum": ["port", "quay"]}},
    "required": ["where"],
    "additionalProperties": False,
}
GREEDY = ("--top-k", 1, "--dtype", "fp32")


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    """Write a model in FP8, and its dequantized values in float32."""
    quantized, plain = tmp_path / "fp8", tmp_path / "plain"
    for directory in (quantized, plain):
        save_model("nemotron_h", directory)
    write_plain(plain, quantize(quantized, KINDS["transformers F32"]), "F32")
    return quantized, plain


def test_generate_with_quantized_weights_matches_dequantized_weights(
    directories: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"prompt_tokens": PROMPT, "num_tokens_to_generate": 24}))
    replies = []
    for directory in directories:
        output = tmp_path / "out.json"
        flags = ("--hf-model", directory, "--prompts", lines, *GREEDY, "--output-path", output)
        finished = run_here(capsys, *flags)
        assert finished.status == 0, finished.stderr
        replies.append(json.loads(output.read_text())["requests"][0]["generated_tokens"])
        reported = ", fp32 from 10 quantized tensors (10 of FP8 in blocks of 128 x 128; "
        assert (reported in finished.stdout.splitlines()[0]) is (directory.name == "fp8")
    assert replies[0] == replies[1]


@pytest.mark.parametrize("flags", [(), ("--dequantize-weights",)])
def test_weights_stay_quantized_unless_the_flag_is_given(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model("nemotron_h", tmp_path)
    quantize(tmp_path, KINDS["compressed-tensors FP8 a row"])
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"prompt_tokens": PROMPT, "num_tokens_to_generate": 2}))
    finished = run_here(capsys, "--hf-model", tmp_path, "--prompts", lines, "--dtype", "bf16", *flags)
    assert finished.status == 0, finished.stderr
    assert ("of which stay quantized" in finished.stdout.splitlines()[0]) is not bool(flags)


def test_flags_for_quantized_weights_apply_to_the_draft_model_too(
    directories: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []

    def load(directory: Path, dtype: Any, **settings: Any) -> LoadedModel:
        loads.append(settings)
        return load_hugging_face(directory, dtype, **settings)

    monkeypatch.setattr(ready_model, "load_hugging_face", load)
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"prompt_tokens": PROMPT, "num_tokens_to_generate": 4}))
    flags = ("--dequantize-weights", "--activation-dtype", "bf16", "--num-speculative-tokens", 2, *GREEDY)
    models = ("--hf-model", directories[0], "--drafter", "draft-model", "--draft-hf-model", directories[0])
    finished = run_here(capsys, *models, "--prompts", lines, *flags)
    assert finished.status == 0, finished.stderr
    assert loads == [{"dequantizes": True, "activation_dtype": "bf16", "mtp": "none"}] * 2


def test_serve_reuses_the_prefix_of_a_second_turn(directories: tuple[Path, Path]) -> None:
    flags = ("--hf-model", str(directories[0]), "--dtype", "fp32", "--served-model-name", "fp8")
    with running_server(*flags) as server, server.client() as client:
        cached = []
        for prompt in (PROMPT, [*PROMPT, 1, 2, 3]):
            body = {"model": "fp8", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and cached[1] >= 128


def test_fp8_qwen_model_calls_a_tool_and_reuses_the_first_turn(tmp_path: Path) -> None:
    save_model("qwen3_5_moe with vision", tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(QWEN_3_6)
    quantize(tmp_path, KINDS["transformers BF16"])
    tool = {"type": "function", "function": {"name": "look", "parameters": LOOK}}
    fields: dict[str, Any] = {"tools": [tool], "parallel_tool_calls": False, "max_tokens": 100}
    fields |= {"chat_template_kwargs": {"enable_thinking": False}}  # random thoughts have no end
    messages: list[Any] = [{"role": "user", "content": "How high is the tide? " * 40}]
    with running_server("--hf-model", str(tmp_path), "--dtype", "fp32") as server, server.client() as client:
        for seed in range(20):  # a random model may begin to think all the same
            asked = {"messages": messages, "tool_choice": "required", "seed": seed, **fields}
            first = client.post("/v1/chat/completions", json=asked)
            assert first.status_code == 200, first.text
            message = first.json()["choices"][0]["message"]
            if "tool_calls" in message:
                break
        (call,) = message["tool_calls"]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "low"}]
        second = client.post("/v1/chat/completions", json={"messages": messages, **fields})
        assert second.status_code == 200, second.text
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"])["where"] in ("port", "quay")
    usage = second.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first.json()["usage"]["prompt_tokens"] // 64 * 64


def test_doctor_reports_how_weights_are_quantized(
    directories: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    reported = "; weights in FP8 in blocks of 128 x 128\n"
    for directory in directories:
        assert main(["doctor", "--model", str(directory)]) == 0
        assert (reported in capsys.readouterr().out) is (directory.name == "fp8")
