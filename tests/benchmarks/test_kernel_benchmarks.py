"""Parts of the kernel benchmarks that need no GPU: copies, byte counts and tables."""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch

from megatron_mamba_cache.kernels.attention.reference import paged_attention_ref
from tests.command_line.command_runs import REPOSITORY


@pytest.fixture
def slot_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    yield import_module("slot_copies")


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    yield import_module("attention")


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    yield import_module("experts")


@pytest.mark.parametrize("script", ["slot_copies", "attention", "experts"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="measures where a GPU is")
def test_benchmark_reports_that_it_needs_a_gpu(
    script: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [script])
    with pytest.raises(SystemExit):
        request.getfixturevalue(script).main()
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_copy_benchmark_reads_every_source_slot_once(count: int, slot_copies: ModuleType) -> None:
    lists = slot_copies.slot_numbers(count, "cpu")
    assert {len(slots) for slots in lists} == {count}
    assert torch.cat(lists).tolist() == list(range(slot_copies.NUM_SOURCES))


def test_copy_benchmark_uses_the_state_sizes_of_the_models(slot_copies: ModuleType) -> None:
    sizes = {model.name: round(model.slot_bytes / 2**20, 1) for model in slot_copies.MODELS}
    assert sizes == {"8B bf16": 49.4, "8B fp32": 97.4, "Nano bf16": 23.8, "Nano fp32": 46.8}


def test_copy_table_has_a_line_for_each_count_and_a_column_for_each_method(slot_copies: ModuleType) -> None:
    figures = [slot_copies.Figure("8B", count, way, 10.0, 9.0) for count in (1, 4) for way in ("op", "loop")]
    lines = slot_copies.table(figures).splitlines()
    assert lines[0] == "| model, slots | memcpy, µs | op: µs, of memcpy | loop: µs, of memcpy |"
    assert lines[3] == "| 8B, 4 | 9.0 | 10.0, 0.900 | 10.0, 0.900 |"


def test_attention_case_gives_each_request_its_own_kv_blocks(attention: ModuleType) -> None:
    case = attention.Case("small", 2, 3, 300)
    rows = attention.rows_of(case, "cpu")
    cache = torch.randn(2, rows.block_table.numel(), attention.BLOCK_SIZE, 2, 8)
    assert paged_attention_ref(torch.randn(6, 4, 8), cache[0], cache[1], rows, 0.3).isfinite().all()
    assert sorted(rows.block_table.flatten().tolist()) == list(range(4))


def test_attention_case_has_the_expected_bytes_and_flops(attention: ModuleType) -> None:
    shape = attention.shape_of("8b", torch.device("cpu"))
    prefill, decode = attention.Case("prefill", 1, 4, 6), attention.Case("decode", 3, 1, 10)
    assert attention.attention_flops(prefill, shape) == 4 * (3 + 4 + 5 + 6) * 32 * 128
    assert attention.attention_bytes(decode, shape) == 2 * 128 * (2 * 3 * 10 * 8 + 2 * 3 * 32)


def test_attention_benchmark_prints_one_line_per_measurement(attention: ModuleType) -> None:
    figures = [
        attention.Figure("decode", "twin", 10.0, 1e6, 1e9, 5.0, memcpy_us=2.5),
        attention.Figure("append", "op", 2.0, 1e4, memcpy_us=1.8),
    ]
    assert attention.table(figures).splitlines()[2:] == [
        "| decode | twin | 10.0 | 100 | 0.250 | 100 | 5 |",
        "| append | op | 2.0 | 5 | 0.900 |  |  |",
    ]


@pytest.mark.parametrize(("shared_inner", "has_gate"), [(0, False), (48, False), (48, True)])
def test_benchmark_checks_the_moe_layer_against_torch(
    shared_inner: int, has_gate: bool, experts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = experts.LayerShape(8, 64, 32, "gated_silu", experts.RoutingRule(2), shared_inner, has_gate)
    monkeypatch.setattr(torch, "mm", lambda left, right, out_dtype: left.to(out_dtype) @ right.to(out_dtype))  # on CPUs
    bench = experts.Bench("small", shape, "cpu")
    for num_tokens in (1, 5, 40):
        bench.check(bench.inputs(num_tokens))
    assert (shape.expert_bytes, shape.shared_bytes) == (2 * 3 * 64 * 32, 2 * 3 * 64 * shared_inner)
    if has_gate:
        monkeypatch.setattr(bench, "_gate_of", lambda x: None)
        with pytest.raises(RuntimeError, match="layer and peer differ"):
            bench.check(bench.inputs(5))


@pytest.mark.parametrize("name", ["qwen36-27b", "qwen36-35b"])
def test_gated_attention_benchmark_launches_the_same_kernels_as_the_engine(name: str, attention: ModuleType) -> None:
    shape = attention.shape_of(name, torch.device("cpu"))
    heads = attention.GatedHeads(shape, 3)
    ways = heads.ways_of_inputs()
    assert list(ways) == ["append_kv", "write_attention_inputs", "write_attention_inputs_ref"]
    plain, found, twin = (launches[0]() for launches in ways.values())
    assert found.shape == plain.shape == (3, shape.num_heads, 256)
    assert torch.equal(found, twin) and not torch.equal(found, plain)
    assert [launches[0]().shape for launches in heads.ways_of_gates().values()] == [found.shape] * 2
