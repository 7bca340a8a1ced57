"""Attention over slots of FP8 keys and values matches the reference; its bits depend on a token's context only."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.attention import flashinfer, fp8_decode, slot_attention
from megatron_mamba_cache.kernels.attention.choice import choose_attention
from megatron_mamba_cache.kernels.attention.fp8_decode import SlotAttention
from megatron_mamba_cache.kernels.attention.fp8_tiles import run_of
from megatron_mamba_cache.kernels.attention.interface import AttentionBackend, AttentionShape
from megatron_mamba_cache.kernels.attention.kv_values import FP8, KVScales
from megatron_mamba_cache.kernels.attention.reference import paged_attention_ref
from megatron_mamba_cache.kernels.attention.slot_attention import TritonAttention
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from tests.kernels import attention_libraries
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched
from tests.kernels.packed_batches import same_bits
from tests.kernels.test_attention_backends import (
    CAPTURED,
    SCALES,
    Captured,
    CapturedSteps,
    Mix,
    Step,
    fp8_caches,
    shape_of,
)
from tests.kernels.test_quantized_compilation import spilled_bytes

Compile = Callable[[ModuleType, str], CompiledInsteadOfLaunched]

HAS_CUDA = torch.cuda.is_available() and not INTERPRETED


@pytest.fixture
def device() -> str:
    """Return the device on which kernels run."""
    if not HAS_CUDA and not INTERPRETED:
        pytest.skip("needs a GPU or Triton's interpreter")
    return "cuda" if HAS_CUDA else "cpu"


MIXES: dict[str, Mix] = {
    "decode": [(1, 1), (1, 512), (1, 513), (1, 700), (1, 30)],
    "verify": [(5, 5), (3, 515), (4, 514), (1, 257), (5, 600)],
    "empty rows": [(0, 0), (1, 400), (0, 300), (2, 2), (0, 0)],
}
SHAPES = {
    "groups of 4": {"num_heads": 8, "head_dim": 128},
    "groups of 6": {"num_heads": 12, "head_dim": 256},
    "groups of 16, small blocks": {"num_heads": 32, "head_dim": 64, "block_size": 32},
    "40 channels": {"num_heads": 2, "head_dim": 40, "block_size": 24},
}


def attended(step: Step, shape: AttentionShape, k: Tensor, v: Tensor, scales: KVScales = SCALES) -> Tensor:
    out = torch.full_like(step.q, torch.nan)
    SlotAttention(shape, step.rows, len(step.rows.query_lens)).run(step.q, k, v, out, scales)
    return out


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
@pytest.mark.parametrize("form", SHAPES.values(), ids=SHAPES.keys())
def test_attention_over_slots_matches_the_reference(mix: Mix, form: dict[str, int], device: str) -> None:
    """The tolerance is the rounding error of fp16 weights and, of results, of bf16."""
    torch.manual_seed(0)
    shape = shape_of(device, torch.bfloat16, has_fp8_kv=True, **form)
    step = Step(mix, shape)
    k, v, expected = fp8_caches(step)
    torch.testing.assert_close(attended(step, shape, k, v).float(), expected, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_queries_of_any_size_neither_overflow_nor_vanish(size: float, device: str) -> None:
    torch.manual_seed(1)
    shape = shape_of(device, torch.bfloat16, num_heads=4, head_dim=64, has_fp8_kv=True)
    step = Step([(2, 300)], shape)
    k, v, _ = fp8_caches(step)
    step.q[0] *= size
    scales = KVScales(SCALES.key / size, SCALES.value)
    expected = paged_attention_ref(step.q[:1].float(), k, v, one_token(step, 0).rows, shape.scale, scales)
    found = attended(step, shape, k, v, scales)
    torch.testing.assert_close(found[:1].float(), expected, rtol=2**-7, atol=2**-8)
    assert found.isfinite().all()


def one_token(step: Step, token: int) -> Step:
    """Return the step's first request at one of its query tokens, alone and without later tokens."""
    alone = object.__new__(Step)
    rows = step.rows
    seen = rows.kv_lens[0] - rows.query_lens[0] + token + 1
    device = step.q.device
    alone.q = step.q[token : token + 1]
    alone.rows = replace(
        rows,
        cu_query=torch.tensor([0, 1], dtype=torch.int32, device=device),
        kv_lengths=torch.tensor([seen], dtype=torch.int32, device=device),
        block_table=rows.block_table[:1],
        query_lens=(1,),
        kv_lens=(seen,),
        host_block_table=rows.host_block_table[:1],
    )
    return alone


@pytest.mark.parametrize("form", SHAPES.values(), ids=SHAPES.keys())
def test_bits_of_a_token_depend_neither_on_other_tokens_nor_on_other_requests(
    form: dict[str, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    shape = shape_of(device, torch.bfloat16, has_fp8_kv=True, **form)
    step = Step([(5, 515), (3, 700), (1, 40)], shape)
    k, v, _ = fp8_caches(step)
    found = attended(step, shape, k, v)
    for token in range(5):
        assert same_bits(attended(one_token(step, token), shape, k, v)[0], found[token])
    monkeypatch.setattr(fp8_decode, "_MOST_PARTS_BYTES", 1)  # a launch per request
    assert same_bits(attended(step, shape, k, v), found)


def test_slots_grow_with_the_longest_context_so_that_partial_results_are_few() -> None:
    assert [fp8_decode.slot_len(size) for size in (256, 2**16, 2**16 + 1, 2**18, 2**20)] == [512, 512, 1024, 2048, 8192]


def test_codes_are_decoded_exactly(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(FP8).float()
    shape = shape_of(device, torch.float16, num_heads=1, num_kv_heads=1, head_dim=256, has_fp8_kv=True)
    step = Step([(1, 1)], shape)
    v = torch.zeros(step.v.shape, dtype=torch.uint8, device=device)
    v[:, 0, 0] = torch.where(values.isnan(), 0, codes)
    k = torch.zeros_like(v)
    found = attended(step, shape, k.view(FP8), v.view(FP8), KVScales(1.0, 1.0))
    assert torch.equal(found[0, 0].float().cpu(), values.nan_to_num(0.0))


@pytest.mark.parametrize("is_fast", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize(("head_dim", "spilled"), [(64, 0), (128, 0), (256, 128)])
def test_kernels_compile_once_for_all_steps(
    head_dim: int,
    spilled: int,
    is_fast: bool,
    compile_for_hopper: Compile,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """With 256 channels, registers do not suffice for up to 128 bytes per thread."""
    attend = "attend_slots_hopper_kernel" if is_fast else "attend_slots_kernel"
    kernels = [compile_for_hopper(fp8_decode, name) for name in ("count_slots_kernel", attend, "combine_slots_kernel")]
    monkeypatch.setattr(fp8_decode, "runs_on_hopper", lambda shape: is_fast)
    shape = shape_of(dtype=torch.bfloat16, head_dim=head_dim, has_fp8_kv=True)
    for mix in ([(1, 700)], [(2, 515), (1, 70)], [(5, 515), (3, 700), (1, 40)], [(3, 90)]):
        step = Step(mix, shape)
        attended(step, shape, *fp8_caches(step)[:2])
    assert len(kernels[1].compiled) == len(kernels[2].compiled) == 1 + is_fast  # up to 16 rows, or more
    assert max(spilled_bytes(cubin, tmp_path) for cubin in kernels[1].cubins) <= spilled
    if is_fast:
        for ptx, bytes_of_shared in zip(kernels[1].ptx, kernels[1].shared_bytes, strict=True):
            assert ptx.count("prmt.b32 x") == run_of(head_dim) * head_dim // 32  # two codes, of keys and of values
            assert bytes_of_shared <= 113 * 1024 or "reqntid 256" in ptx  # two programs on a multiprocessor


@pytest.mark.parametrize("name", ["flashinfer", "triton"])
@pytest.mark.parametrize("captured_rows", CAPTURED.values(), ids=CAPTURED.keys())
def test_backends_attend_decode_requests_over_fp8_in_slots(
    captured_rows: Captured, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and name == "flashinfer":
        pytest.skip("tests of FlashInfer run there")
    shape = shape_of(device, torch.bfloat16, num_heads=4, head_dim=8, block_size=64, has_fp8_kv=True)
    backend: AttentionBackend = TritonAttention(shape)
    if name == "flashinfer":
        attention_libraries.put_libraries_in_place(monkeypatch)
        monkeypatch.setattr(flashinfer, "runs_on_hopper", lambda shape: True)
        backend = flashinfer.FlashInferAttention(shape)
    steps = CapturedSteps(captured_rows, shape)
    captured = backend.capture(steps.rows)
    for seed, mix in enumerate(captured_rows.mixes):
        torch.manual_seed(seed)
        step, rows = steps.load([(query_len, min(kv_len, 300)) for query_len, kv_len in mix if query_len <= 300], shape)
        if step is None:
            continue
        captured.plan_again(rows)
        k, v, expected = fp8_caches(step)
        num_decode = min(captured_rows.num_decode, len(mix))
        eager = backend.plan(replace(step.rows, num_decode_requests=num_decode))
        monkeypatch.setattr(attention_libraries, "IN_GRAPHS", True)
        for attend, q in ((captured.begin(), steps.q), (eager, step.q)):
            found = attend(q, k, v, SCALES)[: len(step.q)]
            torch.testing.assert_close(found.float(), expected, rtol=2**-6, atol=2**-7)
            monkeypatch.setattr(attention_libraries, "IN_GRAPHS", False)


def test_fp8_keys_and_values_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_attention, "half_precision_refusal", lambda *_: None)
    assert choose_attention("auto", shape_of(dtype=torch.bfloat16, has_fp8_kv=True)).name == "triton"
    with pytest.raises(ValueError, match="it only reads an FP8 KV cache; set --kv-cache-dtype to fp8"):
        choose_attention("triton", shape_of(dtype=torch.bfloat16))
