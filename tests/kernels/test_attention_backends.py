"""Attention backends match the reference where their library is installed, and the right one serves a model."""

import logging
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from itertools import accumulate, takewhile

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.config import CacheConfig
from megatron_mamba_cache.kernels.attention import choice, flashinfer
from megatron_mamba_cache.kernels.attention.choice import BACKENDS, BackendClass, choose_attention
from megatron_mamba_cache.kernels.attention.flash_attn import cumulative_lengths
from megatron_mamba_cache.kernels.attention.flashinfer_calls import page_lists
from megatron_mamba_cache.kernels.attention.interface import (
    AttentionBackend,
    AttentionRows,
    AttentionShape,
    attend_rows,
)
from megatron_mamba_cache.kernels.attention.kv_values import FP8, KVScales
from megatron_mamba_cache.kernels.attention.reference import ReferenceAttention, paged_attention_ref
from tests.kernels import attention_libraries
from tests.kernels.packed_batches import same_bits

BLOCK = 256
LIBRARIES = BACKENDS[:-2]
"""Backends that call a library."""
JUNK = 2**30  # a block id that may not be read

Mix = list[tuple[int, int]]  # query tokens and cached tokens of each row
MIXES: dict[str, Mix] = {
    "decode": [(1, 1), (1, 256), (1, 257), (1, 1500), (1, 30)],
    "verify": [(5, 5), (3, 700), (9, 256), (1, 257), (5, 1031)],
    "prefill": [(300, 300), (513, 513)],
    "prefill with history": [(1, 260), (300, 812), (4, 4), (257, 257 + 256), (2, 900)],
    "empty rows": [(0, 0), (1, 400), (0, 0), (0, 300), (6, 6), (0, 0)],
    "one token": [(1, 1)],
}


def shape_of(device: str = "cpu", dtype: torch.dtype = torch.float32, **changes: object) -> AttentionShape:
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    shape = AttentionShape(16, 2, 128, BLOCK, scale=0.11, dtype=dtype, device=where)
    return replace(shape, **changes)  # type: ignore[arg-type]


class Step:
    """A step over a cache with shuffled blocks; unused tokens are NaN, and unused block ids are invalid."""

    def __init__(self, mix: Mix, shape: AttentionShape, num_padding_tokens: int = 0) -> None:
        num_blocks = [-(-kv_len // shape.block_size) for _, kv_len in mix]
        free = torch.randperm(sum(num_blocks) + 2).tolist()
        options = {"dtype": shape.dtype, "device": shape.device}
        cache_shape = (2, len(free), shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.k, self.v = torch.full(cache_shape, float("nan"), **options)
        table = np.full((len(mix), max(num_blocks) + 2), JUNK, np.int32)
        for row, (_, kv_len) in enumerate(mix):
            table[row, : num_blocks[row]] = [free.pop() for _ in range(num_blocks[row])]
            for token in range(0, kv_len, shape.block_size):
                block, count = table[row, token // shape.block_size], min(shape.block_size, kv_len - token)
                self.k[block, :count].normal_()
                self.v[block, :count].normal_()
        num_tokens = sum(query_len for query_len, _ in mix)
        self.q = torch.randn(num_tokens + num_padding_tokens, shape.num_heads, shape.head_dim, **options)
        self.rows = AttentionRows(
            torch.tensor([0, *accumulate(query_len for query_len, _ in mix)], dtype=torch.int32, device=shape.device),
            torch.tensor([kv_len for _, kv_len in mix], dtype=torch.int32, device=shape.device),
            torch.from_numpy(table).to(shape.device),
            tuple(query_len for query_len, _ in mix),
            tuple(kv_len for _, kv_len in mix),
            table,
            num_decode_requests=len(list(takewhile(lambda row: row[0] <= 16, mix))),
        )

    def reference(self, scale: float) -> Tensor:
        """Compute the result of the reference in float32."""
        return paged_attention_ref(self.q.float(), self.k.float(), self.v.float(), self.rows, scale)


# Choice of the backend for a model.


def test_attention_settings_are_auto_and_the_names_of_the_backends() -> None:
    assert {"auto", *(backend.setting for backend in BACKENDS)} == set(CacheConfig.RULES["attention_backend"])


@pytest.mark.parametrize("setting", ["auto", "reference"])
def test_attention_uses_the_reference_on_a_cpu(setting: str) -> None:
    assert isinstance(choose_attention(setting, shape_of(dtype=torch.bfloat16)), ReferenceAttention)


@pytest.mark.parametrize("setting", ["flash-attn", "flashinfer", "torch-varlen"])
def test_error_for_unavailable_attention_backend_says_how_to_fix_it(setting: str) -> None:
    with pytest.raises(ValueError, match=f"attention_backend '{setting}' cannot.*set --attention-backend to auto"):
        choose_attention(setting, shape_of())


class FailingAttention:
    name = setting = "failing"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        return None

    def __init__(self, shape: AttentionShape) -> None:
        raise OSError("no compiler")


def test_failing_attention_backend_is_skipped_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "BACKENDS", (FailingAttention, ReferenceAttention))
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_attention("auto", shape_of()), ReferenceAttention)
    assert "does not use failing: it fails with OSError: no compiler" in caplog.text
    with pytest.raises(ValueError, match="no compiler"):
        choose_attention("failing", shape_of())


def test_attention_uses_the_reference_for_float32(device: str) -> None:
    for backend in BACKENDS:
        assert (backend.refusal(shape_of(device)) is None) == (backend is ReferenceAttention)


# Arguments passed to the libraries.


def test_reference_attention_backend_equals_the_reference_op(device: str) -> None:
    torch.manual_seed(0)
    shape = shape_of(device, num_heads=4, head_dim=8, block_size=8)
    step = Step([(1, 9), (3, 11), (0, 0)], shape, num_padding_tokens=2)
    out = ReferenceAttention(shape).plan(step.rows)(step.q, step.k, step.v)
    assert same_bits(out, step.reference(shape.scale))


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_page_lists_contain_every_kv_block_of_requests_with_query_tokens(mix: Mix) -> None:
    shape = shape_of(num_heads=1, num_kv_heads=1, head_dim=1)
    step = Step(mix, shape)
    lists = page_lists(step.rows, BLOCK)
    assert {part.dtype for part in (lists.cu_query, lists.cu_pages, lists.pages, lists.last_page_lens)} == {torch.int32}
    used = [row for row, (query_len, _) in enumerate(mix) if query_len]
    assert lists.cu_query.diff().tolist() == [mix[row][0] for row in used]
    for number, row in enumerate(used):
        pages = lists.pages[lists.cu_pages[number] : lists.cu_pages[number + 1]].tolist()
        assert pages == step.rows.host_block_table[row, : len(pages)].tolist()
        assert (len(pages) - 1) * BLOCK + int(lists.last_page_lens[number]) == mix[row][1]
        assert 0 < lists.last_page_lens[number] <= BLOCK


def test_cumulative_kv_lengths_start_at_zero(device: str) -> None:
    step = Step(MIXES["verify"], shape_of(device, num_heads=2, head_dim=1))
    lengths = cumulative_lengths(step.rows)
    assert lengths.dtype == torch.int32
    assert lengths.tolist() == [0, *accumulate(kv_len for _, kv_len in MIXES["verify"])]


@pytest.mark.parametrize(("num_tokens", "num_padding"), [(3, 0), (3, 2), (0, 2), (0, 0)])
def test_attention_gives_zeros_for_tokens_after_the_last_request(num_tokens: int, num_padding: int) -> None:
    q = torch.randn(num_tokens + num_padding, 2, 4)
    seen: list[int] = []

    def double(tokens: Tensor) -> Tensor:
        seen.append(len(tokens))
        return 2 * tokens

    out = attend_rows(q, num_tokens, double)
    assert torch.equal(out[:num_tokens], 2 * q[:num_tokens]) and not out[num_tokens:].any()
    assert seen == [num_tokens] * (num_tokens > 0)


@pytest.fixture
def stand_in_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_libraries.put_libraries_in_place(monkeypatch)


@pytest.mark.usefixtures("stand_in_libraries")
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("built", LIBRARIES, ids=lambda built: built.name)
def test_attention_backend_passes_correct_arguments_to_its_library(mix: Mix, built: BackendClass) -> None:
    torch.manual_seed(0)
    shape = shape_of(num_heads=4, head_dim=8)
    step = Step(mix, shape, num_padding_tokens=1)
    attend = built(shape).plan(step.rows)
    for _ in range(2):  # a plan serves every layer
        expected = step.reference(shape.scale)
        torch.testing.assert_close(attend(step.q, step.k, step.v), expected, rtol=1e-6, atol=1e-6)
        step.v.neg_()


SCALES = KVScales(0.02, 0.006)


def fp8_caches(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Return a step's keys and values as FP8 codes for SCALES, and the reference's result over what they stand for."""
    # Older releases of torch convert larger values to NaN.
    k, v = (step.k / SCALES.key).clamp(-448, 448).to(FP8), (step.v / SCALES.value).clamp(-448, 448).to(FP8)
    exact_k, exact_v = k.float() * SCALES.key, v.float() * SCALES.value
    return k, v, paged_attention_ref(step.q.float(), exact_k, exact_v, step.rows, 0.11)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_reference_attends_to_fp8_codes_times_their_scales(mix: Mix, device: str) -> None:
    torch.manual_seed(0)
    shape = shape_of(device, num_heads=4, head_dim=8, has_fp8_kv=True)
    step = Step(mix, shape, num_padding_tokens=1)
    k, v, expected = fp8_caches(step)
    assert same_bits(ReferenceAttention(shape).plan(step.rows)(step.q, k, v, SCALES), expected)
    assert not torch.equal(expected, step.reference(shape.scale)) or not any(query for query, _ in mix)


@pytest.mark.usefixtures("stand_in_libraries")
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_flashinfer_reads_fp8_keys_and_values_with_fa2_only(mix: Mix) -> None:
    torch.manual_seed(0)
    shape = shape_of(num_heads=4, head_dim=8, has_fp8_kv=True)
    step = Step(mix, shape, num_padding_tokens=1)
    k, v, expected = fp8_caches(step)
    backend = flashinfer.FlashInferAttention(shape)
    torch.testing.assert_close(backend.plan(step.rows)(step.q, k, v, SCALES), expected, rtol=1e-6, atol=1e-6)
    steps = CapturedSteps(Captured((1, 1, 512, 0), 2, []), shape)
    parts = backend.capture(steps.rows).parts
    assert len(parts) == 2 and not any(part.attention._wrapper._reads_plan for part in parts)
    with pytest.raises(ValueError, match="fa3 does not read an FP8 KV cache"):
        flashinfer.FlashInferAttention(shape, "fa3")


@pytest.mark.usefixtures("stand_in_libraries")
@pytest.mark.parametrize("setting", ["flash-attn", "torch-varlen"])
def test_other_libraries_refuse_an_fp8_kv_cache_with_the_remedy(setting: str) -> None:
    with pytest.raises(ValueError, match="does not read an FP8 KV cache; install flashinfer, or set --kv-cache-dtype"):
        choose_attention(setting, shape_of(dtype=torch.bfloat16, has_fp8_kv=True))


# Inside captured graphs.


@dataclass(frozen=True)
class Captured:
    """Consecutive steps that use one captured call.

    Args:
        most: Maximum number of query tokens for each request.
        num_decode: Number of requests that decode.
    """

    most: tuple[int, ...]
    num_decode: int
    mixes: list[Mix]


CAPTURED = {
    "decode": Captured(
        (1, 1, 1, 1), 4, [[(1, 700), (1, 1), (1, 256)], [(1, 257)], [(1, 90), (1, 3), (1, 512), (1, 1030)], []]
    ),
    "verify": Captured(
        (4, 4, 4, 4),
        4,
        [[(4, 700), (1, 1), (3, 259)], [(2, 2)], [(4, 90), (4, 4), (4, 512), (4, 1030)], [(1, 300), (2, 1500)]],
    ),
    "prompts beside decoding": Captured(
        (1, 1, 600, 0),
        2,
        [
            [(1, 700), (1, 1), (300, 812), (300, 300)],
            [(1, 900), (1, 1), (600, 1500)],
            [(1, 1300), (1, 257), (2, 2), (597, 1021)],
        ],
    ),
    "short prompts": Captured((64, 0, 0, 0), 0, [[(30, 300), (34, 34)], [(1, 1), (60, 1500)], [(64, 600)], []]),
}
CAPTURED_ROWS, CAPTURED_BLOCKS = 4, 6
by_captured = pytest.mark.parametrize("captured_rows", CAPTURED.values(), ids=CAPTURED.keys())


def captured_mixes(captured: Captured, block_size: int) -> Iterator[Mix]:
    """Yield each mix of requests, followed by the same mix one token later."""
    for mix in captured.mixes:
        yield mix
        yield [(query_len, kv_len + (kv_len % block_size > 0)) for query_len, kv_len in mix]


class CapturedSteps:
    """Steps that reuse one captured call, with padded requests in fixed buffers."""

    def __init__(self, captured: Captured, shape: AttentionShape) -> None:
        options = {"dtype": torch.int32, "device": shape.device}
        self.table = np.zeros((CAPTURED_ROWS, CAPTURED_BLOCKS), np.int32)
        bound = CAPTURED_BLOCKS * shape.block_size
        self.rows = AttentionRows(
            torch.tensor([0, *accumulate(captured.most)], **options),
            torch.tensor(captured.most, **options),
            torch.zeros(CAPTURED_ROWS, CAPTURED_BLOCKS, **options),
            captured.most,
            (bound,) * CAPTURED_ROWS,
            self.table,
            captured.num_decode,
            torch.full((CAPTURED_ROWS,), shape.block_size, **options),
        )
        half = {"dtype": shape.dtype, "device": shape.device}
        self.q = torch.zeros(sum(captured.most), shape.num_heads, shape.head_dim, **half)
        cache_shape = (2, CAPTURED_ROWS * CAPTURED_BLOCKS, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.k, self.v = torch.zeros(cache_shape, **half)

    def load(self, mix: Mix, shape: AttentionShape) -> tuple[Step | None, AttentionRows]:
        """Write a step's requests and padding to the captured buffers; return the step and its plan's inputs."""
        step = Step(mix, shape) if mix else None
        unused = CAPTURED_ROWS - len(mix)
        num_tokens = sum(query_len for query_len, _ in mix)
        ends = [0, *accumulate(query_len for query_len, _ in mix), *[num_tokens] * unused]
        self.rows.cu_query.copy_(torch.tensor(ends, dtype=torch.int32))
        kv_lengths = torch.tensor([*(kv for _, kv in mix), *[0] * unused], dtype=torch.int32)
        self.rows.kv_lengths.copy_(kv_lengths)
        self.rows.last_block_lens.copy_((kv_lengths - 1) % shape.block_size + 1)
        if step is not None:
            held = np.minimum(step.rows.host_block_table, CAPTURED_ROWS * CAPTURED_BLOCKS - 1)
            self.table[: len(mix), : held.shape[1]] = held[:, :CAPTURED_BLOCKS]
            self.rows.block_table.copy_(torch.from_numpy(self.table))
            self.q[:num_tokens].copy_(step.q)
            for mine, theirs in ((self.k, step.k), (self.v, step.v)):
                mine[: len(theirs)].copy_(theirs.nan_to_num(0.0))
        lengths = {
            "query_lens": (*(query_len for query_len, _ in mix), *[0] * unused),
            "kv_lens": (*(kv_len for _, kv_len in mix), *[0] * unused),
        }
        return step, replace(self.rows, **lengths)


def test_split_kv_workspace_is_as_large_as_flashinfer_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "num_multiprocessors", lambda device: 132)
    shape = shape_of(num_heads=32, num_kv_heads=8, head_dim=128)
    tile_of_16, tile_of_128 = (32 * tile * 129 * 4 for tile in (16, 128))
    assert flashinfer.parts_bytes(shape, num_rows=1, num_tokens=1) == 33 * tile_of_16 + 32  # two per multiprocessor
    assert flashinfer.parts_bytes(shape, num_rows=256, num_tokens=256) == (64 + 255) * tile_of_16 + 32
    assert flashinfer.parts_bytes(shape, num_rows=64, num_tokens=256) == (8 + 63) * tile_of_128 + 32


@pytest.mark.parametrize(("head_dim", "most_tile"), [(64, 128), (128, 128), (256, 64)])
def test_plan_buffer_has_space_for_every_tile_request_and_token(
    head_dim: int, most_tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute the plan size like FlashInfer, but without alignment."""
    monkeypatch.setattr(flashinfer, "num_multiprocessors", lambda device: 132)
    shape, grain = shape_of(num_heads=32, num_kv_heads=8, head_dim=head_dim), 64 * 2**10
    for num_rows, num_tokens in ((1, 1), (4, 4096), (256, 256), (256, 2304), (64, 16_384), (4096, 4096), (2, 2**18)):
        group, longest = 4, (num_tokens - num_rows + 1) * 4
        tile = most_tile if longest > 64 else 16 if longest <= 16 else 64
        num_tiles = max(-(-num_tokens * group // tile) + num_rows - 1, 2 * 132 // 8)
        of_fa2 = 3 * 4 * num_tiles + num_tiles + 4 * (num_rows + 1) + 4 * (num_tokens + 1) + 8
        of_fa3 = 7 * 4 * 32 * (-(-num_tokens // 128) + num_rows - 1) + 4 * 133
        found = flashinfer.plan_bytes(shape, num_rows, num_tokens)
        assert found % grain == 0 and max(of_fa2, of_fa3) + 16 * 12 <= found <= max(of_fa2, of_fa3) + 3 * grain


@pytest.mark.usefixtures("stand_in_libraries")
@by_captured
@pytest.mark.parametrize("built", [*LIBRARIES, ReferenceAttention], ids=lambda built: built.name)
def test_captured_attention_uses_the_batch_of_each_replay(
    captured_rows: Captured, built: BackendClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_libraries, "IN_GRAPHS", True)
    torch.manual_seed(3)
    shape = shape_of(num_heads=4, head_dim=8)
    steps = CapturedSteps(captured_rows, shape)
    captured = built(shape).capture(steps.rows)
    for seed, mix in enumerate(captured_mixes(captured_rows, shape.block_size)):
        torch.manual_seed(seed // 2)  # each mix and what it grows to have the same blocks
        step, rows = steps.load(mix, shape)
        captured.plan_again(rows)
        out = captured.begin()(steps.q, steps.k, steps.v)
        if step is not None:
            torch.testing.assert_close(out[: len(step.q)], step.reference(shape.scale), rtol=1e-6, atol=1e-6)


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow the FlashInfer backend on a CPU and in fp32."""
    monkeypatch.setattr(flashinfer, "half_precision_refusal", lambda *asked: None)


@pytest.mark.usefixtures("stand_in_libraries")
def test_flashinfer_is_preferred_over_other_attention_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in BACKENDS:
        monkeypatch.setattr(backend, "refusal", staticmethod(lambda shape: None))
    assert choose_attention("auto", shape_of(num_heads=4, head_dim=8)).name == "flashinfer"


@pytest.mark.usefixtures("stand_in_libraries", "any_device")
@pytest.mark.parametrize(("named", "kernels"), [(None, ("fa2", "fa3")), ("fa2", ("fa2", "fa2"))], ids=["best", "fa2"])
def test_flashinfer_startup_check_runs_every_call_that_steps_and_graphs_use(
    named: str | None, kernels: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, bool, str]] = []
    make, finished = flashinfer._wrapper, []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: finished.append(len(calls)))

    def wrapper(space: Tensor, kernel: str, **other: object) -> object:
        built = make(space, kernel, **other)
        for name in ("plan", "run"):
            call = getattr(built, name)

            def noted(*given: object, name: str = name, call: Callable[..., object] = call, **named: object) -> object:
                assert os.environ["PATH"].split(os.pathsep)[-1] == sysconfig.get_path("scripts")  # where ninja is
                calls.append((kernel, bool(other), name))
                return call(*given, **named)

            setattr(built, name, noted)
        return built

    monkeypatch.setattr(flashinfer, "_wrapper", wrapper)
    flashinfer.FlashInferAttention(shape_of(num_heads=32, num_kv_heads=2, head_dim=8), named)
    for in_graph in (False, True):
        for kernel in kernels:
            # With "fa3", the backend also tests a graph with a split history, which has two calls.
            expected = kernels.count(kernel) + 2 * (in_graph and kernel == "fa3")
            assert calls.count((kernel, in_graph, "run")) == expected
            # "fa2" reads lengths that each step writes, so it needs a new plan only when the pages change.
            replayed = in_graph and kernel == "fa3"
            assert calls.count((kernel, in_graph, "plan")) == expected * (1 + replayed)
    assert finished == [len(calls)]


@pytest.mark.usefixtures("stand_in_libraries")
@pytest.mark.parametrize("has_offsets", [True, False], ids=["0.5", "0.6 and later"])
def test_graphs_share_index_buffers_if_flashinfer_supports_it(
    has_offsets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_libraries.BatchPrefillWithPagedKVCacheWrapper, "HAS_OFFSETS", has_offsets)
    built: list[object] = []
    make = flashinfer._wrapper
    monkeypatch.setattr(
        flashinfer, "_wrapper", lambda *given, **other: (built.append(make(*given, **other)), built[-1])[1]
    )
    shape = shape_of(num_heads=32, num_kv_heads=2, head_dim=8)
    flashinfer.FlashInferAttention(shape).capture(CapturedSteps(Captured((1, 1, 512, 0), 2, []), shape).rows)
    buffers = [getattr(one, "_vector_sparse_indices_buffer", None) for one in built if one._reads_plan]
    assert len(buffers) == 5  # of steps outside of graphs, of the trials, with and without pieces, and of the graph
    assert len({id(one) for one in buffers}) == 1 and (buffers[0] is not None) == has_offsets


@pytest.mark.usefixtures("stand_in_libraries", "any_device")
def test_flashinfer_without_graph_support_is_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flashinfer, "is_installed", lambda package: True)
    monkeypatch.delattr(attention_libraries.BatchPrefillWithPagedKVCacheWrapper, "reset_workspace_buffer")
    with caplog.at_level(logging.WARNING):
        assert choose_attention("auto", shape_of(num_heads=4, head_dim=8)).name != "flashinfer"
    assert "does not use flashinfer: it fails with AttributeError" in caplog.text


@pytest.mark.parametrize(
    ("release", "is_older"),
    {"0.5.2": True, "0.10.0": False, "0.5.3": False, "0.5.3+cu130": False, "0.0.0+unknown": False, "?": False}.items(),
)
def test_error_for_an_old_flashinfer_says_how_to_upgrade(
    release: str, is_older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "is_installed", lambda package: True)
    monkeypatch.setattr(flashinfer, "version", lambda distribution: release)
    reason = flashinfer.FlashInferAttention.refusal(shape_of())
    older = f"flashinfer {release} is older than 0.5.3; install the extra `gpu` for a newer release"
    assert reason == (older if is_older else "it needs a CUDA device, found cpu")


@pytest.mark.usefixtures("any_device")
def test_flashinfer_of_an_unknown_version_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def untold(distribution: str) -> str:
        raise PackageNotFoundError(distribution)

    monkeypatch.setattr(flashinfer, "is_installed", lambda package: True)
    monkeypatch.setattr(flashinfer, "version", untold)
    assert flashinfer.FlashInferAttention.refusal(shape_of()) is None


class OtherAttention(FailingAttention):
    name = setting = "other"

    def __init__(self, shape: AttentionShape) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "dtype", "is_logged"),
    [("cuda", torch.bfloat16, True), ("cuda", torch.float32, False), ("cpu", torch.bfloat16, False)],
)
def test_missing_flashinfer_is_logged_for_half_precision_on_a_gpu(
    kind: str, dtype: torch.dtype, is_logged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flashinfer, "is_installed", lambda package: False)
    monkeypatch.setattr(choice, "BACKENDS", (flashinfer.FlashInferAttention, OtherAttention, ReferenceAttention))
    shape = replace(shape_of(dtype=dtype), device=torch.device(kind, 0))
    with caplog.at_level(logging.WARNING):
        choose_attention("auto", shape)
        choose_attention("other", shape)
        monkeypatch.setattr(choice, "BACKENDS", (OtherAttention, flashinfer.FlashInferAttention))
        choose_attention("auto", shape)
    text = "attention runs on other, not on flashinfer: flashinfer is not installed; install the extra `gpu`"
    assert [record.message for record in caplog.records] == [text] * is_logged


class UncompiledAttention(FailingAttention):
    def __init__(self, shape: AttentionShape) -> None:
        raise RuntimeError("the build failed\nwith much output")


def test_compiler_output_of_a_failing_attention_backend_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "BACKENDS", (UncompiledAttention, OtherAttention))
    with caplog.at_level(logging.WARNING):
        choose_attention("auto", replace(shape_of(dtype=torch.bfloat16), device=torch.device("cuda", 0)))
    failed = "it fails with RuntimeError: the build failed"
    assert [record.message for record in caplog.records] == [
        f"attention does not use failing: {failed}\nwith much output",
        f"attention runs on other, not on failing: {failed}",
    ]


@pytest.mark.usefixtures("stand_in_libraries")
def test_flashinfer_plan_is_reused_until_the_pages_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_libraries, "IN_GRAPHS", True)
    planned: list[int] = []
    plan = flashinfer.PagedAttention.plan_pages
    monkeypatch.setattr(
        flashinfer.PagedAttention, "plan_pages", lambda self, pages: (planned.append(1), plan(self, pages))
    )
    shape = shape_of(num_heads=4, head_dim=8)
    steps = CapturedSteps(CAPTURED["decode"], shape)
    captured = flashinfer.FlashInferAttention(shape).capture(steps.rows)
    _, rows = steps.load([(1, 250), (1, 300)], shape)
    planned.clear()
    for first_len in range(250, 260):  # the second page starts at token 257
        captured.plan_again(replace(rows, kv_lens=(first_len, 300, 0, 0)))
    assert len(planned) == 2
    steps.table[1] += 1
    captured.plan_again(replace(rows, kv_lens=(259, 300, 0, 0)))
    assert len(planned) == 3


@pytest.mark.usefixtures("stand_in_libraries")
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "kernels"),
    [
        (2048, 8, ["fa3"]),
        (1024, 8, ["fa3 of 2", "fa3"]),
        (512, 32, ["fa3"]),
        (384, 16, ["fa3 of 2", "fa3"]),
        (256, 16, ["fa3 of 4", "fa3"]),
        (128, 32, ["fa2"]),
        (64, 32, ["fa2"]),
    ],
)
def test_graphs_use_split_kv_fa3_for_prompts_that_do_not_fill_the_gpu(
    num_tokens: int, num_heads: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    make = flashinfer._wrapper

    def noted(workspace: Tensor, name: str, **buffers: Tensor) -> object:
        num_copies = len(buffers["paged_kv_last_page_len_buf"]) // 3 if buffers else 0  # two prompts and padding
        built.append(f"{name} of {num_copies}" if num_copies > 1 else name)
        return make(workspace, name, **buffers)

    monkeypatch.setattr(flashinfer, "_wrapper", noted)
    shape = shape_of(num_heads=num_heads, num_kv_heads=2, head_dim=8)
    backend = flashinfer.FlashInferAttention(shape)
    built.clear()
    backend.capture(CapturedSteps(Captured((1, 1, num_tokens, 0), 2, []), shape).rows)
    assert built == ["fa2", *kernels]


@pytest.mark.usefixtures("stand_in_libraries")
def test_split_kv_workspace_is_enlarged_for_many_query_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces: list[int] = []
    make = flashinfer._wrapper
    monkeypatch.setattr(
        flashinfer, "_wrapper", lambda space, name, **other: (spaces.append(len(space)), make(space, name, **other))[1]
    )
    flashinfer.FlashInferAttention(shape_of(num_heads=4, head_dim=8))
    flashinfer.FlashInferAttention(shape_of(num_heads=32, num_kv_heads=2, head_dim=128))
    # Two eager calls, one captured call for each, and two calls for a split history.
    assert spaces == [128 * 2**20] * 6 + [132 * 128 * 32 * 129 * 4 + 32] * 6


@pytest.mark.usefixtures("stand_in_libraries")
@pytest.mark.parametrize(
    ("release", "reads_all"),
    [("0.5.3", False), ("0.0.0+unknown", False), ("0.6.0rc1", False), ("0.6.0", True), ("0.6.18.post1", True)],
)
def test_fa2_is_used_when_blocks_are_out_of_fa3s_address_range(
    release: str, reads_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[str] = []
    make = flashinfer._wrapper

    def wrapper(space: Tensor, name: str, **other: object) -> object:
        built = make(space, name, **other)
        plan = built.plan
        built.plan = lambda **pages: (planned.append(name), plan(**pages))[1]
        return built

    monkeypatch.setattr(flashinfer, "_wrapper", wrapper)
    monkeypatch.setattr(flashinfer, "version", lambda distribution: release)
    far, last_near = ("fa3", None) if reads_all else ("fa2", 3)
    apart = 16 * 2**30  # so that four blocks fit within 64 GiB
    shape = shape_of(num_heads=64, num_kv_heads=4, head_dim=8, num_blocks=6, block_stride_bytes=apart)
    backend = flashinfer.FlashInferAttention(shape)
    for kv_len, blocks, kernel in [(500, [0, 3], "fa3"), (500, [3, 4], far), (500, [0, 3], "fa3"), (100, [5], far)]:
        step = Step([(1, 1), (90, kv_len)], shape)
        step.rows.host_block_table[1, : len(blocks)] = blocks
        planned.clear()
        backend.plan(step.rows)
        assert planned == ["fa2", kernel], blocks
    for num_tokens, num_blocks, may_be_left_out, kernel, last_block in [
        (2048, 6, False, far, None),
        (2048, 6, True, "fa3", last_near),
        (2048, 4, True, "fa3", None),
        (2048, 4, False, "fa3", None),
        (1024, 6, True, far, None),
    ]:
        rows = CapturedSteps(Captured((1, 1, num_tokens, 0), 2, []), shape).rows
        planned.clear()
        built = flashinfer.FlashInferAttention(replace(shape, num_blocks=num_blocks))
        captured = built.capture(rows, may_be_left_out=may_be_left_out)
        assert (planned[-1], captured.last_block) == (kernel, last_block)


@pytest.mark.parametrize("values", [[3, 7, 5], [2], [-4, -9]])
def test_largest_of_a_tensor_or_list_equals_max(values: list[int]) -> None:
    assert flashinfer.largest(torch.tensor(values)).item() == max(values) == flashinfer.largest(values)
    assert flashinfer.largest(4, 9) == 9 and flashinfer.largest([], default=1) == 1


# The libraries themselves.

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["usual", pytest.param("256 channels", marks=pytest.mark.slow)], scope="module")
def shape(request: pytest.FixtureRequest) -> AttentionShape:
    """Return a shape with groups of 8 heads, or of 6 as in Qwen3.6-27B, which FlashInfer compiles for minutes."""
    usual = shape_of("cuda", torch.bfloat16)
    return usual if request.param == "usual" else replace(usual, num_heads=24, num_kv_heads=4, head_dim=256, scale=0.08)


@pytest.fixture(params=LIBRARIES, ids=lambda backend: backend.name, scope="module")
def backend(shape: AttentionShape, request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    built: BackendClass = request.param
    reason = built.refusal(shape)
    if reason is not None:
        pytest.skip(f"{built.name}: {reason}")
    yield built(shape)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("num_padding", [0, 3])
def test_attention_backend_matches_the_reference(
    mix: Mix, num_padding: int, shape: AttentionShape, backend: AttentionBackend
) -> None:
    """The tolerance is the rounding error of bf16 weights and results, whose values are below 4."""
    torch.manual_seed(1)
    step = Step(mix, shape, num_padding)
    attend = backend.plan(step.rows)
    for _ in range(2):  # a plan serves every layer
        out = attend(step.q, step.k, step.v)
        assert out.dtype == torch.bfloat16 and out.shape == step.q.shape
        torch.testing.assert_close(out.float(), step.reference(shape.scale), rtol=2**-7, atol=2**-6)
        assert not out[out.shape[0] - num_padding :].any()
        step.v.neg_()


@pytest.mark.gpu
@needs_cuda
def test_attention_backend_handles_consecutive_steps_of_different_sizes(
    shape: AttentionShape, backend: AttentionBackend
) -> None:
    torch.manual_seed(2)
    for mix in [*MIXES.values(), *reversed(MIXES.values())]:
        step = Step(mix, shape)
        out = backend.plan(step.rows)(step.q, step.k, step.v)
        torch.testing.assert_close(out.float(), step.reference(shape.scale), rtol=2**-7, atol=2**-6)


@pytest.mark.gpu
@needs_cuda
@by_captured
def test_captured_attention_on_a_gpu_uses_the_requests_of_each_replay(
    captured_rows: Captured, shape: AttentionShape, backend: AttentionBackend
) -> None:
    torch.manual_seed(4)
    steps = CapturedSteps(captured_rows, shape)
    captured = backend.capture(steps.rows)
    captured.begin()(steps.q, steps.k, steps.v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.begin()(steps.q, steps.k, steps.v)
    for seed, mix in enumerate(captured_mixes(captured_rows, shape.block_size)):
        torch.manual_seed(seed // 2)  # each mix and what it grows to have the same blocks
        step, rows = steps.load(mix, shape)
        captured.plan_again(rows)
        graph.replay()
        if step is not None:
            found = out[: len(step.q)].float()
            torch.testing.assert_close(found, step.reference(shape.scale), rtol=2**-7, atol=2**-6)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("built", LIBRARIES, ids=lambda built: built.name)
@pytest.mark.parametrize("mix", [MIXES["decode"], MIXES["prefill with history"]], ids=["decode", "prefill"])
def test_attention_reads_kv_blocks_beyond_64_gib(mix: Mix, built: BackendClass) -> None:
    """Between the blocks of one layer are those of other layers and states, so strides are large."""
    if torch.cuda.mem_get_info()[0] < 72 * 2**30:
        pytest.skip("needs 72 GiB of free device memory")
    torch.manual_seed(5)
    apart, num_blocks = 2**30, 66
    shape = shape_of("cuda", torch.bfloat16, num_blocks=num_blocks, block_stride_bytes=apart)
    if (reason := built.refusal(shape)) is not None:
        pytest.skip(f"{built.name}: {reason}")
    step = Step(mix, shape)
    num_used = len(step.k)
    memory = torch.full((num_blocks * apart // 2,), float("nan"), dtype=torch.bfloat16, device=shape.device)
    sizes, half = step.k.shape[1:], apart // 4
    strides = (apart // 2, shape.num_kv_heads * shape.head_dim, shape.head_dim, 1)
    k, v = (memory.as_strided((num_blocks, *sizes), strides, first) for first in (0, half))
    k[num_blocks - num_used :], v[num_blocks - num_used :] = step.k, step.v
    expected = step.reference(shape.scale)
    step.rows.host_block_table[:] = np.minimum(step.rows.host_block_table + num_blocks - num_used, num_blocks - 1)
    step.rows.block_table.copy_(torch.from_numpy(step.rows.host_block_table))
    out = built(shape).plan(step.rows)(step.q, k, v)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-6)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("head_dim", [64, 128, pytest.param(256, marks=pytest.mark.slow)])
def test_flashinfer_matches_the_reference_over_fp8_keys_and_values(mix: Mix, head_dim: int) -> None:
    shape = shape_of("cuda", torch.bfloat16, head_dim=head_dim, has_fp8_kv=True)
    if (reason := flashinfer.FlashInferAttention.refusal(shape)) is not None:
        pytest.skip(reason)
    torch.manual_seed(1)
    step = Step(mix, shape, num_padding_tokens=3)
    k, v, expected = fp8_caches(step)
    out = flashinfer.FlashInferAttention(shape).plan(step.rows)(step.q, k, v, SCALES)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-6)


@pytest.mark.gpu
@needs_cuda
@by_captured
def test_captured_flashinfer_reads_fp8_keys_and_values(captured_rows: Captured) -> None:
    shape = shape_of("cuda", torch.bfloat16, has_fp8_kv=True)
    if (reason := flashinfer.FlashInferAttention.refusal(shape)) is not None:
        pytest.skip(reason)
    backend, steps = flashinfer.FlashInferAttention(shape), CapturedSteps(captured_rows, shape)
    codes = [torch.zeros(steps.k.shape, device=shape.device).to(FP8) for _ in range(2)]
    captured = backend.capture(steps.rows)
    captured.begin()(steps.q, *codes, SCALES)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.begin()(steps.q, *codes, SCALES)
    for seed, mix in enumerate(captured_mixes(captured_rows, shape.block_size)):
        torch.manual_seed(seed // 2)
        step, rows = steps.load(mix, shape)
        captured.plan_again(rows)
        if step is not None:
            *found, expected = fp8_caches(step)
            for mine, theirs in zip(codes, found, strict=True):
                mine[: len(theirs)].copy_(theirs)
        graph.replay()
        if step is not None:
            torch.testing.assert_close(out[: len(step.q)].float(), expected, rtol=2**-7, atol=2**-6)
