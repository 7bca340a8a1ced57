"""The `plan` command: its output and its errors."""

import json
import re
from pathlib import Path

import pytest

from megatron_mamba_cache.command_line.main import main
from tests.models.published_configs import QWEN

SHIPPED = Path(__file__).parents[2] / "megatron_mamba_cache/models/small_python_model"
KV, STATE = ("--kv-bytes-per-token", "1024"), ("--state-bytes", "65536")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return the recorded load of a session with two turns; the second prompt begins with the first turn."""
    first = {"t": 0, "in": 512, "out": 200, "hash_ids": list(range(8))}
    second = {"t": 5, "in": 800, "out": 9, "hash_ids": list(range(13))}
    path = tmp_path / "load.jsonl"
    path.write_text(json.dumps({"block_size": 64, "requests": [first, second]}))
    return path


def planned(capfd: pytest.CaptureFixture[str], trace: Path, *flags: str) -> tuple[int, str, str]:
    status = main(["plan", "--trace", str(trace), *flags])
    return status, *capfd.readouterr()


def test_plan_json_has_one_entry_per_cache_size(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, _ = planned(capfd, trace, *KV, *STATE, "--block-size", "64", "--cache-gb", "0.0004", "1", "--json")
    # 711 computed tokens of the first turn end with a state at 704.
    assert status == 0 and json.loads(out) == [
        {
            "cache_gb": size,
            "host_cache_gb": 0.0,
            "prompt_tokens": 1312,
            "skipped_tokens": skipped,
            "share": skipped / 1312,
            "unlimited_share": 704 / 1312,
        }
        for size, skipped in ((0.0004, 0), (1.0, 704))
    ]


def test_plan_table_has_a_line_per_size_and_for_an_unlimited_cache(
    trace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, out, err = planned(capfd, trace, *KV, *STATE, "--cache-gb", "1", "2")
    assert status == 0 and not err
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["1", "2", "unlimited"]


def test_plan_combines_every_device_size_with_every_host_size(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = (*KV, *STATE, "--cache-gb", "1", "2", "--host-cache-gb", "0", "4")
    status, out, _ = planned(capfd, trace, *flags, "--json")
    combined = [(1, 0), (1, 4), (2, 0), (2, 4)]
    assert status == 0 and [(row["cache_gb"], row["host_cache_gb"]) for row in json.loads(out)] == combined
    status, out, _ = planned(capfd, trace, *flags)
    heading, *lines, unlimited = out.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [[str(size), str(host)] for size, host in combined]
    assert len({len(line) for line in (heading, *lines, unlimited)}) == 1, "columns are not aligned"
    assert unlimited.split()[1] == "1,312"


@pytest.mark.parametrize("has_files", [False, True])
def test_plan_reads_model_sizes_from_the_configuration(
    has_files: bool, trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the files of the shipped model, it has a multi-token prediction head, with which a server starts."""
    config = json.loads((SHIPPED / "config.json").read_text())
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    conv_dim = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    weights = 2 if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else 4
    layers = config["layers_block_type"]
    state = layers.count("linear_attention") * (inner * config["ssm_state_size"] * 4 + 3 * conv_dim * weights)
    state += has_files * config["hidden_size"] * weights
    num_layers = layers.count("full_attention") + has_files
    kv = num_layers * 2 * config["num_key_value_heads"] * config["head_dim"] * weights
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, err = planned(capfd, trace, "--model", str(SHIPPED if has_files else tmp_path))
    assert status == 0 and f"{kv:,} bytes of KV a token, {state:,} bytes a state" in out and not err


def test_plan_uses_the_same_sizes_for_a_quantized_model_as_for_bf16(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((SHIPPED / "config.json").read_text())
    sizes = []
    for fields in ({"dtype": "bfloat16"}, {"dtype": None, "quantization_config": {"quant_method": "fp8"}}):
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        status, out, err = planned(capfd, trace, "--model", str(tmp_path))
        assert status == 0 and not err
        sizes.append(out)
    assert sizes[0] == sizes[1]


def test_plan_uses_only_the_language_model_of_a_multimodal_model(
    trace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN["Qwen3.6-35B-A3B"]))
    conv, matrices = 3 * (2 * 16 * 128 + 32 * 128) * 2, 32 * 128 * 128 * 4
    status, out, err = planned(capfd, trace, "--hf-model", str(tmp_path))
    assert status == 0 and f"20,480 bytes of KV a token, {30 * (conv + matrices):,} bytes a state" in out and not err


def test_quantized_state_takes_a_byte_per_value_and_a_scale_per_channel(
    trace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((SHIPPED / "config.json").read_text())
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    conv_dim = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    weights = 2 if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else 4
    num_layers = config["layers_block_type"].count("linear_attention")
    state = num_layers * (inner * config["ssm_state_size"] + 4 * inner + 3 * conv_dim * weights)
    state += config["hidden_size"] * weights  # of the head
    status, out, err = planned(capfd, trace, "--model", str(SHIPPED), "--cached-state-dtype", "int8")
    assert status == 0 and f" {state:,} bytes a state" in out and not err


def test_fp16_state_takes_two_bytes_per_value(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = json.loads((SHIPPED / "config.json").read_text())
    num_layers = config["layers_block_type"].count("linear_attention")
    values = num_layers * config["mamba_num_heads"] * config["mamba_head_dim"] * config["ssm_state_size"]
    sizes = []
    for dtype in ("fp32", "fp16"):
        status, out, err = planned(capfd, trace, "--model", str(SHIPPED), "--ssm-state-dtype", dtype)
        assert status == 0 and not err
        sizes.append(int(re.findall(r" ([\d,]+) bytes a state", out)[0].replace(",", "")))
    assert sizes[0] - sizes[1] == 2 * values


def test_fp8_kv_takes_a_byte_per_element(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = json.loads((SHIPPED / "config.json").read_text())
    per_layer = 2 * config["num_key_value_heads"] * config["head_dim"]
    num_bytes = (config["layers_block_type"].count("full_attention") + 1) * per_layer  # one layer of the head
    status, out, err = planned(capfd, trace, "--model", str(SHIPPED), "--kv-cache-dtype", "fp8")
    assert num_bytes and status == 0 and f" {num_bytes:,} bytes of KV a token" in out and not err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*KV, *STATE, "--cached-state-dtype", "int8"), "--cached-state-dtype needs --model"),
        ((*KV, *STATE, "--ssm-state-dtype", "fp16"), "--ssm-state-dtype needs --model"),
        ((*KV, *STATE, "--kv-cache-dtype", "fp8"), "--kv-cache-dtype needs --model"),
        (KV, "--state-bytes is missing"),
        ((), "--kv-bytes-per-token is missing"),
        ((*KV, *STATE, "--model", "x"), "--model cannot be combined with"),
        (("--model", "nowhere"), "--model nowhere"),
        ((*KV, "--state-bytes", "0"), "--state-bytes is 0"),
        ((*KV, *STATE, "--cache-gb", "0"), "--cache-gb is 0.0"),
        ((*KV, *STATE, "--cache-gb", "nan"), "--cache-gb is nan"),
        ((*KV, *STATE, "--block-size", "0"), "--block-size is 0"),
        ((*KV, *STATE, "--block-size", "96"), "--block-size 96: a block has 96 tokens and a hash covers 64 tokens"),
        ((*KV, *STATE, "--host-cache-gb", "-1"), "--host-cache-gb is -1.0"),
        ((*KV, *STATE, "--host-cache-gb", "nan"), "--host-cache-gb is nan"),
    ],
)
def test_plan_with_an_invalid_flag_prints_a_one_line_error(
    flags: tuple[str, ...], message: str, trace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, out, err = planned(capfd, trace, *flags)
    assert status == 2 and not out and err.count("\n") == 1 and message in err


def test_plan_with_an_unreadable_trace_prints_a_one_line_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(b"no gzip")
    for path in (tmp_path / "missing.jsonl", tmp_path, broken):
        status, out, err = planned(capfd, path, *KV, *STATE)
        assert status == 2 and not out and err.count("\n") == 1 and f"--trace {path}" in err
