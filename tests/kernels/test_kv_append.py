"""New keys and values are written to their cache slots and nowhere else, by kernel and reference.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_mamba_cache.kernels.attention import kv_append
from megatron_mamba_cache.kernels.attention.kv_append import append_kv, append_kv_ref
from megatron_mamba_cache.kernels.attention.kv_values import FP8, KVScales
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED, launches_kernel
from tests.kernels.kernel_stand_ins import CountedKernel
from tests.kernels.packed_batches import same_bits

BLOCK, NUM_BLOCKS = 4, 5
Op = Callable[..., Tensor | None]
both_ops = pytest.mark.parametrize("op", [append_kv, append_kv_ref])
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True, scope="module")
def counted_kernel() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_append, "_append_kv_kernel", CountedKernel(kv_append._append_kv_kernel))
        yield


def new_tokens(
    num_tokens: int, kv_heads: int, dim: int, queries: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as strided views of a joint projection, with one padding query."""
    joint = torch.randn(num_tokens + 1, kv_heads, (queries + 2) * dim + 3, device=device).to(dtype)
    if INTERPRETED:
        joint = joint.bfloat16().to(dtype)  # the interpreter would truncate to bfloat16
    query, key, value = joint[:, :, 3:].split((queries * dim, dim, dim), dim=-1)
    return query.unflatten(-1, (queries, dim)), key[:num_tokens], value[:num_tokens]


def check_op(
    op: Op,
    slots: list[tuple[int, int]],
    device: str,
    kv_heads: int = 2,
    dim: int = 8,
    new_dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype = torch.bfloat16,
    slot_dtype: torch.dtype = torch.int32,
    queries: int = 0,
) -> None:
    query, key, value = new_tokens(len(slots), kv_heads, dim, max(queries, 1), device, new_dtype)
    caches = torch.full((2, NUM_BLOCKS, BLOCK, kv_heads, dim), float("nan"), dtype=cache_dtype, device=device)
    expected = caches.clone()
    for token, (block, offset) in enumerate(slots):
        if block >= 0:
            expected[0, block, offset] = key[token].to(cache_dtype)
            expected[1, block, offset] = value[token].to(cache_dtype)
    blocks, offsets = (torch.tensor(list(part), dtype=slot_dtype, device=device) for part in zip(*slots, strict=True))
    before = kv_append._append_kv_kernel.launches
    packed = op(key, value, caches[0], caches[1], blocks, offsets, query if queries else None)
    is_kernel = op is append_kv and launches_kernel(key) and torch.float64 not in (new_dtype, cache_dtype)
    assert kv_append._append_kv_kernel.launches - before == is_kernel
    assert same_bits(caches, expected)
    if not queries:
        assert packed is None
        return
    assert packed.shape == (len(slots) + 1, kv_heads * queries, dim) and packed.is_contiguous()
    assert same_bits(packed[: len(slots)], query[: len(slots)].flatten(1, 2))


@both_ops
@pytest.mark.parametrize("blocks", [[2, 0, 2], [-1, 1, -1], [-1, -1, -1], [3]])
def test_kv_append_skips_tokens_with_a_negative_block(blocks: list[int], op: Op, device: str) -> None:
    check_op(op, list(zip(blocks, [3, 0, 1], strict=False)), device)


@both_ops
@settings(max_examples=15)
@given(data=st.data())
def test_kv_append_writes_only_the_slots_of_its_tokens(op: Op, data: st.DataObject) -> None:
    every = [(block, offset) for block in range(NUM_BLOCKS) for offset in range(BLOCK)]
    slots = data.draw(st.permutations(every))[: data.draw(st.integers(1, len(every)))]
    slots = [(-1, offset) if data.draw(st.booleans()) else (block, offset) for block, offset in slots]
    heads, dim, queries = (data.draw(st.sampled_from(sizes)) for sizes in ((1, 2, 3, 4), (1, 3, 8, 20), (0, 1, 5)))
    check_op(op, slots, "cpu", heads, dim, queries=queries)


@both_ops
@pytest.mark.parametrize(("kv_heads", "dim", "queries"), [(1, 1, 1), (8, 128, 4), (2, 63, 16), (5, 96, 0), (40, 64, 1)])
@pytest.mark.parametrize(
    ("new_dtype", "cache_dtype", "slot_dtype"),
    [
        (torch.bfloat16, torch.bfloat16, torch.int64),
        (torch.float32, torch.float32, torch.int32),
        (torch.float32, torch.bfloat16, torch.int32),
        (torch.float64, torch.float64, torch.int32),
    ],
)
def test_kv_append_handles_odd_sizes(
    kv_heads: int,
    dim: int,
    queries: int,
    new_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    slot_dtype: torch.dtype,
    op: Op,
    device: str,
) -> None:
    check_op(op, [(3, 1), (-1, 0), (0, 3)], device, kv_heads, dim, new_dtype, cache_dtype, slot_dtype, queries)


SPECIAL = (0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 448.0, 464.0, -480.0, 3e38, 2**-10)
"""Values at the limits of e4m3: zeros, NaN, values that are limited to 448, and half of the smallest value."""


def exact_codes(values: Tensor, scale: float) -> Tensor:
    """Return the nearest e4m3 code of values / scale, found among all codes in fp64; of two, the even one."""
    every = torch.arange(127, dtype=torch.uint8).view(FP8).double()  # 0 to 448
    quotients = (values.float() / torch.tensor(scale)).double()
    size = quotients.abs().nan_to_num(0.0, 448.0).clamp_max(448.0)
    distances = (size[..., None] - every).abs()
    nearest = distances == distances.amin(-1, keepdim=True)
    preferred = nearest.int() * (2 - torch.arange(127) % 2)  # at most two are nearest, and one of them is even
    codes = preferred.argmax(-1) + 128 * torch.signbit(quotients)
    return torch.where(quotients.isnan(), 0x7F, codes).to(torch.uint8)


@both_ops
@settings(max_examples=25, deadline=None)
@given(
    values=st.lists(
        st.one_of(st.sampled_from(SPECIAL), st.floats(-1000, 1000, width=16), st.floats(-0.0625, 0.0625, width=16)),
        min_size=16,
        max_size=16,
    ),
    scales=st.tuples(*[st.floats(2**-10, 2**10, width=32)] * 2),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
)
def test_fp8_kv_append_writes_the_nearest_code_of_the_scaled_value(
    op: Op, values: list[float], scales: tuple[float, float], dtype: torch.dtype
) -> None:
    key = torch.tensor(values).to(torch.bfloat16).to(dtype).view(1, 2, 8)
    value = key.flip(-1)
    caches = torch.full((2, NUM_BLOCKS, BLOCK, 2, 8), 1.0).to(FP8)
    expected = caches.clone()
    expected[:, 3, 1] = torch.stack([exact_codes(key[0], scales[0]), exact_codes(value[0], scales[1])]).view(FP8)
    slot = torch.tensor([3], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    before = kv_append._append_kv_kernel.launches
    op(key, value, caches[0], caches[1], *slot, scales=KVScales(*scales))
    assert kv_append._append_kv_kernel.launches - before == (op is append_kv and launches_kernel(key))
    assert torch.equal(caches.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_kv_append_equals_its_reference_for_every_code_and_the_values_between(
    dtype: torch.dtype, device: str
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    finite = codes[~codes.isnan()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    near = [middles.nextafter(torch.tensor(end)) for end in (-1e9, 1e9)]
    values = torch.cat((codes, middles, *near, torch.tensor(SPECIAL), torch.randn(1024) * 100))
    key = values[: len(values) // 8 * 8].view(-1, 1, 8).to(dtype).to(device)
    blocks = torch.arange(len(key), dtype=torch.int32, device=device)
    written = []
    for op in (append_kv, append_kv_ref):
        caches = torch.zeros(2, len(key), 1, 1, 8, device=device).to(FP8)
        op(key, key.flip(-1), caches[0], caches[1], blocks, torch.zeros_like(blocks), scales=KVScales(0.37, 3.1))
        written.append(caches.view(torch.uint8))
    assert torch.equal(*written)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_kv_scales_must_be_positive_and_finite(scale: float) -> None:
    with pytest.raises(ValueError, match="value scale of an FP8 KV cache must be positive and finite"):
        KVScales(1.0, scale)


def test_kv_append_accepts_zero_tokens(device: str) -> None:
    cache, none = torch.zeros(2, 2, BLOCK, 1, 4, device=device), torch.zeros(0, dtype=torch.int32, device=device)
    append_kv(*torch.zeros(2, 0, 1, 4, device=device), cache[0], cache[1], none, none)
    assert not cache.any()


def bad_calls() -> dict[str, tuple[dict[str, Tensor], str]]:
    """Return invalid arguments, each with an excerpt of the error message."""
    return {
        "heads": ({"key": torch.zeros(3, 4, 8), "value": torch.zeros(3, 4, 8)}, "kv_heads"),
        "caches": ({"v_cache": torch.zeros(NUM_BLOCKS, BLOCK, 2, 8, dtype=torch.bfloat16)}, "equal shapes, strides"),
        "channels": (
            {"key": torch.zeros(3, 2, 16)[:, :, ::2]},
            "channels of key and value and heads of the caches must be contiguous",
        ),
        "float block ids": ({"token_block": torch.zeros(3)}, "token_block must be int32 or int64"),
        "number of offsets": (
            {"token_offset": torch.zeros(4, dtype=torch.int32)},
            r"token_offset must be contiguous with shape \[3\]",
        ),
        "wrong number of heads": ({"query": torch.zeros(3, 3, 4, 8)}, "queries, dim"),
        "too few queries": ({"query": torch.zeros(2, 2, 4, 8)}, "3 or more tokens"),
        "strided queries": ({"query": torch.zeros(3, 2, 8, 8)[:, :, ::2]}, "contiguous for each KV head"),
        "device": ({"value": torch.zeros(3, 2, 8, device="meta")}, "the same device"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_kv_append_refuses_mismatched_arguments(name: str) -> None:
    slots = torch.zeros(3, dtype=torch.int32)
    arguments = {"key": torch.zeros(3, 2, 8), "value": torch.zeros(3, 2, 8), "token_block": slots}
    arguments |= {"k_cache": torch.zeros(NUM_BLOCKS, BLOCK, 2, 8), "v_cache": torch.zeros(NUM_BLOCKS, BLOCK, 2, 8)}
    changes, reason = bad_calls()[name]
    with pytest.raises(ValueError, match=reason):
        append_kv(**arguments | {"token_offset": slots} | changes)


@pytest.mark.gpu
@needs_cuda
def test_kv_append_handles_offsets_beyond_32_bits() -> None:
    block_stride = 2**31 + 8
    num_bytes = (2 * block_stride + 2**16) * 2
    if 2 * num_bytes > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"needs {2 * num_bytes / 2**30:.0f} GiB of free device memory")
    buffers = [torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    k_cache, v_cache = (buffer.as_strided((3, BLOCK, 2, 8), (block_stride, 16, 8, 1)) for buffer in buffers)
    key, value = torch.randn(2, 1, 2, 8, device="cuda").bfloat16()
    blocks, offsets = (torch.tensor([number], dtype=torch.int32, device="cuda") for number in (2, 1))
    append_kv(key, value, k_cache, v_cache, blocks, offsets)
    assert same_bits(k_cache[2, 1], key[0]) and same_bits(v_cache[2, 1], value[0])
    assert [int(buffer.count_nonzero()) for buffer in buffers] == [int(key.count_nonzero()), int(value.count_nonzero())]
