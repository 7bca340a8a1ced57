"""Products with quantized weights equal those of the weights that codes and scales mean."""

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED, is_hopper, launches_kernel
from megatron_mamba_cache.kernels.quantized import dequantize as dequantize_module
from megatron_mamba_cache.kernels.quantized import few_token_gemm, part_sums, split_token_hopper
from megatron_mamba_cache.kernels.quantized import product as product_module
from megatron_mamba_cache.kernels.quantized import split_tokens as split_tokens_module
from megatron_mamba_cache.kernels.quantized.dequantize import dequantize
from megatron_mamba_cache.kernels.quantized.few_token_gemm import (
    MOST_TOKENS,
    multiply_few_tokens,
    multiply_ref,
    num_counters,
)
from megatron_mamba_cache.kernels.quantized.few_token_tiles import (
    FewTokenTiles,
    SplitTokenTiles,
    choose_hopper_tiles,
    choose_tiles,
    split_token_tiles,
)
from megatron_mamba_cache.kernels.quantized.part_sums import Parts, add_parts, add_parts_ref, program_of
from megatron_mamba_cache.kernels.quantized.product import multiply_quantized
from megatron_mamba_cache.kernels.quantized.quantized_matrix import (
    RUN,
    QuantizedMatrix,
    codes_of_pairs,
    packed,
    unpacked,
)
from megatron_mamba_cache.kernels.quantized.split_token_pipeline import first_shared
from megatron_mamba_cache.kernels.quantized.split_tokens import split_tokens, split_tokens_ref
from tests.kernels.kernel_stand_ins import launches_expected

ROUNDING = 2.0**-8
FP32_SUMS = 1e-6
FP8_SUMS = 2.0**-12
"""Error of sums as a share of the magnitude of their terms: FP8 tensor cores keep 13 bits after the first one."""


def fp8_matrix(rows: int, columns: int, blocks: tuple[int, int] | None, device: str = "cpu") -> QuantizedMatrix:
    """Return a random weight with a scale a block, or a factor a row."""
    codes = torch.randn(rows, columns).mul_(64).to(torch.float8_e4m3fn)
    words = packed(codes.view(torch.uint8), 8).to(device)
    if blocks is None:
        return QuantizedMatrix(words, 8, factors=torch.rand(rows, device=device).add_(0.5))
    grid = -(-rows // blocks[0]), -(-columns // blocks[1])
    return QuantizedMatrix(words, 8, torch.rand(grid, device=device).add_(0.5), None, *blocks)


def tokens(count: int, columns: int, device: str = "cpu") -> Tensor:
    return torch.randn(count, columns, device=device).bfloat16()


def counters(weight: QuantizedMatrix) -> Tensor:
    return torch.zeros(num_counters(weight), dtype=torch.int32, device=weight.words.device)


@pytest.mark.parametrize("code_bits", [8, 4])
def test_packed_codes_unpack(code_bits: int) -> None:
    codes = torch.randint(2**code_bits, (3, 5, 192), dtype=torch.uint8)
    words = packed(codes, code_bits)
    assert words.shape == (3, 5, 192 * code_bits // 16)
    assert torch.equal(unpacked(words, code_bits), codes)


def test_pairs_of_a_checkpoint_have_the_first_code_in_the_low_bits() -> None:
    assert codes_of_pairs(torch.tensor([[0x21, 0x43]], dtype=torch.uint8)).tolist() == [[1, 2, 3, 4]]


def test_every_finite_e4m3_code_is_multiplied_exactly(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    weight = QuantizedMatrix(packed(codes.view(8, 32), 8).to(device), 8)
    identity = torch.eye(32, device=device).bfloat16()
    found = multiply_few_tokens(identity, weight, counters(weight))
    assert torch.equal(found.T.cpu(), codes.view(8, 32).view(torch.float8_e4m3fn).bfloat16())


@pytest.mark.parametrize("blocks", [None, (128, 128), (32, 64), (16, 32)])
@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (200, 160), (1, 32)])
@pytest.mark.parametrize("num_tokens", [1, 16, 17])
def test_product_equals_the_reference(
    num_tokens: int, rows: int, columns: int, blocks: tuple[int, int] | None, device: str
) -> None:
    weight, x = fp8_matrix(rows, columns, blocks, device), tokens(num_tokens, columns, device)
    is_split = isinstance(choose_tiles(weight, num_tokens), SplitTokenTiles)
    with (
        launches_expected(few_token_gemm, "_few_tokens_kernel", of_kernel=not is_split, device=device),
        launches_expected(split_token_hopper, "_split_tokens_hopper_kernel", of_kernel=is_split, device=device),
    ):
        found = multiply_few_tokens(x, weight, counters(weight))
    assert_close_to_reference(found, x, weight, FP8_SUMS if is_split else FP32_SUMS)


def assert_close_to_reference(found: Tensor, x: Tensor, weight: QuantizedMatrix, of_sums: float) -> None:
    """Check that a product was rounded once, after sums with an error of `of_sums` of the magnitude of their terms."""
    expected = multiply_ref(x.double(), weight)
    magnitude = multiply_ref(x.double().abs(), QuantizedMatrix(weight.words & 0x7F7F, 8, *_rest(weight)))
    assert ((found.double() - expected).abs() <= ROUNDING * expected.abs() + of_sums * magnitude).all()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_product_with_nvfp4_equals_the_reference(num_tokens: int, parts: int, device: str) -> None:
    weight, x = fp4_matrix((), 100, 576, 16, device), tokens(num_tokens, 576, device)
    tiles = FewTokenTiles(16 if num_tokens == 1 else 32, 64, 64, parts)
    with launches_expected(few_token_gemm, "_few_tokens_kernel", of_kernel=True, device=device):
        found = multiply_few_tokens(x, weight, counters(weight), tiles=tiles)
    expected = multiply_ref(x.double(), weight)
    assert (found.double() - expected).abs().max() <= 2 * ROUNDING * expected.abs().max()


def _rest(weight: QuantizedMatrix) -> tuple[Tensor | None, Tensor | None, int, int]:
    return weight.scales, weight.factors, weight.block_rows, weight.block_columns


@pytest.mark.parametrize("parts", [2, 8])
def test_parts_of_the_inputs_sum_in_order_and_leave_counters_at_zero(parts: int, device: str) -> None:
    weight, x = fp8_matrix(150, 1024, (128, 128), device), tokens(5, 1024, device)
    used, tiles = counters(weight), FewTokenTiles(16, 64, 64, parts)
    found = multiply_few_tokens(x, weight, used, tiles=tiles)
    assert not used.any()
    assert torch.equal(found, multiply_few_tokens(x, weight, used, tiles=tiles))
    sums = torch.zeros(5, 150, dtype=torch.float64, device=device)
    values = weight.dequantized(torch.float64)
    for first in range(0, 1024, 1024 // parts):
        part = slice(first, first + 1024 // parts)
        sums += x[:, part].double() @ values[:, part].T
    assert (found.double() - sums).abs().max() <= ROUNDING * sums.abs().max()


@pytest.mark.parametrize("blocks", [None, (128, 128)])
def test_a_token_does_not_depend_on_others_of_its_range(blocks: tuple[int, int] | None, device: str) -> None:
    weight, x = fp8_matrix(96, 1024, blocks, device), tokens(MOST_TOKENS, 1024, device)
    if not launches_kernel(x):
        pytest.skip("the bits of the reference depend on the number of tokens")
    used = counters(weight)
    for first, last in ((1, 16), (17, 32), (33, MOST_TOKENS)):
        assert choose_tiles(weight, first) == choose_tiles(weight, last)
        few, many = (multiply_few_tokens(x[:count], weight, used) for count in (first, last))
        assert torch.equal(few, many[:first])


@pytest.mark.parametrize(
    ("num_tiles", "steps", "sharers"), [(1, 1, 1), (4, 40, 132), (3, 5, 15), (7, 11, 9), (2, 9, 5)]
)
def test_programs_share_all_steps_and_the_parts_of_every_tile_are_found(
    num_tiles: int, steps: int, sharers: int
) -> None:
    shared, written = num_tiles * steps, {}
    for program in range(sharers):
        begin, end = (first_shared.fn(number, shared, sharers) for number in (program, program + 1))
        assert begin < end and {program_of.fn(step, shared, sharers) for step in range(begin, end)} == {program}
        for tile in range(begin // steps, (end - 1) // steps + 1):
            low, high = max(begin - tile * steps, 0), min(end - tile * steps, steps)
            key = (2 * program + (low == 0)) if high - low < steps else ("whole", tile)
            assert key not in written
            written[key] = range(tile * steps + low, tile * steps + high)
    for tile in range(num_tiles):
        first, last = (program_of.fn(step, shared, sharers) for step in (tile * steps, (tile + 1) * steps - 1))
        slots = [2 * first + 1, *range(2 * (first + 1), 2 * last + 1, 2)]
        parts = [written[("whole", tile)]] if ("whole", tile) in written else [written[slot] for slot in slots]
        assert [step for part in parts for step in part] == list(range(tile * steps, (tile + 1) * steps))
    assert first_shared.fn(0, shared, sharers) == 0 and first_shared.fn(sharers, shared, sharers) == shared


@pytest.mark.parametrize("has_factors", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 17, 32])
@pytest.mark.parametrize(
    ("rows", "steps", "num_tiles", "sharers"), [(600, 40, 2, 27), (580, 3, 3, 5), (1170, 11, 7, 9)]
)
def test_parts_of_shared_tiles_are_added_in_order(
    rows: int, steps: int, num_tiles: int, sharers: int, num_tokens: int, has_factors: bool, device: str
) -> None:
    first_tile = -(-rows // 128) - num_tiles
    sums = torch.randn(2 * sharers, 4, 128, 8, device=device)
    parts = Parts(sums, steps, num_tiles * steps, first_tile)
    factors = torch.rand(rows, device=device) if has_factors else None
    found, expected = torch.full((2, num_tokens, rows), 7.0, device=device).bfloat16()
    with launches_expected(part_sums, "_add_parts_kernel", of_kernel=True, device=device):
        add_parts(parts, factors, found)
    add_parts_ref(parts, factors, expected)
    assert torch.equal(found, expected)
    assert (expected[:, : first_tile * 128] == 7).all()
    for program in range(sharers):
        begin, end = program * parts.shared // sharers, (program + 1) * parts.shared // sharers
        tile = begin // steps
        if begin % steps == 0 and end % steps == 0:  # a tile of its own: another kernel stores it
            assert (expected[:, (first_tile + tile) * 128 : (first_tile + tile + 1) * 128] == 7).all()


def test_tiles_on_hopper_keep_all_multiprocessors_busy() -> None:
    def chosen(rows: int, columns: int, num_tokens: int = 64) -> tuple[int, int, int]:
        tiles = choose_hopper_tiles(fp8_matrix(rows, columns, (128, 128)), num_tokens)
        return tiles.outputs, tiles.programs, tiles.sharers

    assert chosen(34816, 256) == (256, 132, 8)  # one tile each, and the two steps of four tiles
    assert chosen(34816, 8960, 32) == (128, 132, 112)  # two tiles each, and five steps of the 70 of eight tiles
    assert chosen(4096, 1024) == (128, 128, 128)  # four equal parts of each tile
    assert chosen(128, 512) == (128, 4, 4)  # no more programs than steps


@pytest.mark.parametrize("outputs", [128, 256])
@pytest.mark.parametrize(("programs", "sharers"), [(1, 1), (3, 2), (12, 12)])
@pytest.mark.parametrize("blocks", [None, (128, 128), (64, 256)])
def test_product_on_hopper_equals_the_reference(
    blocks: tuple[int, int] | None, programs: int, sharers: int, outputs: int, device: str
) -> None:
    if device == "cpu" or not is_hopper(torch.device(device, torch.cuda.current_device())):
        pytest.skip("needs a Hopper GPU")
    weight = fp8_matrix(456, 1184, blocks, device)
    for count in (1, 16, 17, 32, 33, MOST_TOKENS):
        x, range_of = tokens(count, 1184, device), 16 if count <= 16 else 32 if count <= 32 else 64
        tiles = split_token_tiles(range_of, outputs, programs, sharers)
        found = multiply_few_tokens(x, weight, counters(weight), tiles=tiles)
        assert_close_to_reference(found, x, weight, FP8_SUMS)
        alone = multiply_few_tokens(x[:1], weight, counters(weight), tiles=tiles)
        assert torch.equal(alone, found[:1])


@pytest.mark.parametrize(("num_tokens", "columns"), [(1, 32), (5, 160), (16, 512), (33, 1184)])
def test_tokens_split_into_pairs_of_fp8_values(num_tokens: int, columns: int, device: str) -> None:
    magnitudes = torch.exp2(torch.randint(-30, 12, (num_tokens, columns), device=device))
    x = (torch.randn(num_tokens, columns, device=device) * magnitudes).bfloat16()
    x[0, :3], x[-1] = 0, x[-1] * 1e-30
    with launches_expected(split_tokens_module, "_split_kernel", of_kernel=True, device=device):
        found = split_tokens(x, 64)
    expected = split_tokens_ref(x, 64)
    for half, other in zip(found.halves.chunk(2), expected.halves.chunk(2), strict=True):
        assert torch.equal(half[:num_tokens].float(), other[:num_tokens].float())
    assert torch.equal(found.scales[:, :num_tokens], expected.scales[:, :num_tokens])
    values = found.joined(num_tokens).unflatten(1, (-1, RUN, 2)).movedim(-1, -2).flatten(1)
    greatest = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in x.double().split(128, dim=1)], 1)
    error = (values - x.double()).abs()
    assert (error <= 2.0**-21 * greatest).all()
    assert not error[x.double().abs() >= 2.0**-13 * greatest].any()


def test_tokens_that_are_not_finite_stay_so(device: str) -> None:
    x = torch.ones(2, 128, device=device).bfloat16()
    x[0, 5], x[1, 7] = torch.nan, torch.inf
    values = split_tokens(x, 16).joined(2)
    assert not values.isfinite().any()


def test_too_many_tokens_are_refused(device: str) -> None:
    weight = fp8_matrix(64, 64, None, device)
    if device == "cpu" and not INTERPRETED:
        pytest.skip("the reference takes any number")
    with pytest.raises(ValueError, match="need 1 to 64 bf16 tokens"):
        multiply_few_tokens(tokens(MOST_TOKENS + 1, 64, device), weight, counters(weight))


def fp4_matrix(leading: tuple[int, ...], rows: int, columns: int, group: int, device: str = "cpu") -> QuantizedMatrix:
    """Return a random weight or stack in NVFP4 (groups of 16) or in MXFP4 (of 32)."""
    words = packed(torch.randint(16, (*leading, rows, columns), dtype=torch.uint8), 4).to(device)
    grid = (*leading, rows, columns // group)
    if group == 32:
        scales = torch.randint(120, 134, grid, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
        return QuantizedMatrix(words, 4, scales, None, 1, 32)
    scales = torch.rand(grid, device=device).mul_(400).to(torch.float8_e4m3fn)
    return QuantizedMatrix(words, 4, scales, torch.rand(*leading, rows, device=device), 1, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("leading", [(), (3,)])
@pytest.mark.parametrize("group", [16, 32])
def test_fp4_is_dequantized_to_the_bit(group: int, leading: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    weight = fp4_matrix(leading, 9, 192, group, device)
    with launches_expected(dequantize_module, "_dequantize_kernel", of_kernel=True, device=device):
        assert torch.equal(dequantize(weight, dtype), weight.dequantized(dtype))


@pytest.mark.parametrize("blocks", [None, (128, 128), (32, 64)])
def test_fp8_is_dequantized_to_the_bit(blocks: tuple[int, int] | None, device: str) -> None:
    weight = fp8_matrix(200, 160, blocks, device)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(dequantize(weight, dtype), weight.dequantized(dtype))


def test_stacked_fp8_with_partial_blocks_is_dequantized_to_the_bit(device: str) -> None:
    matrices = [fp8_matrix(200, 160, (128, 128), device) for _ in range(3)]
    stack = QuantizedMatrix(
        torch.stack([matrix.words for matrix in matrices]),
        8,
        torch.stack([matrix.scales for matrix in matrices if matrix.scales is not None]),
        None,
        128,
        128,
    )
    assert torch.equal(dequantize(stack), stack.dequantized(torch.bfloat16))


@pytest.mark.parametrize("num_tokens", [3, MOST_TOKENS + 3])
@pytest.mark.parametrize("form", ["blocks", "rows", "nvfp4"])
def test_any_number_of_tokens_is_multiplied(
    form: str, num_tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_module, "_SLAB_BYTES", 64 * 192 * 2)  # several slabs
    blocks = (32, 64) if form == "blocks" else None
    weight = fp4_matrix((), 200, 192, 16, device) if form == "nvfp4" else fp8_matrix(200, 192, blocks, device)
    x = tokens(num_tokens, 192, device).unsqueeze(1)
    found = multiply_quantized(x, weight, counters(weight))
    assert found.shape == (num_tokens, 1, 200) and found.dtype == torch.bfloat16
    expected = multiply_ref(x.double(), weight)
    assert (found.double() - expected).abs().max() <= 2 * ROUNDING * expected.abs().max()
