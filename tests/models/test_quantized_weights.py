"""Codes and scales are dequantized as their formats define, for any sizes of matrices and blocks."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mamba_cache.models.checkpoints import quantized_weights
from megatron_mamba_cache.models.checkpoints.quantized_weights import (
    MXFP4,
    MXFP8,
    NVFP4,
    QuantizedWeight,
    WeightFormat,
    fp8,
)
from tests.models.quantized_writer import E2M1, E4M3, floats_of, stored_as

FINITE = np.array([byte for byte in range(256) if byte % 128 != 127], np.uint8)
SIZES = st.integers(1, 40)
LEADING = st.sampled_from([(), (1,), (3,), (2, 2)])
DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
FP8 = st.builds(fp8, SIZES, SIZES) | st.sampled_from([fp8(None, None), fp8(1, None), fp8(128, 128), MXFP8])
Bytes = npt.NDArray[np.uint8]


def tensor_of(values: npt.NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
    """Return a torch tensor that has the bits of these values."""
    return torch.from_numpy(values.copy()).view(dtype).reshape(values.shape)


def scales_of(
    format: WeightFormat, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[torch.Tensor, np.ndarray]:
    """Return random scales of a weight as tensors, and the scale of each element."""
    if "F32" in format.scale_types:
        grid = rng.uniform(1e-3, 30, format.grid(shape)).astype(np.float32)
        stored = torch.from_numpy(grid)
    elif "U8" in format.scale_types:
        exponents = rng.integers(0, 250, format.grid(shape), np.uint8)
        grid, stored = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127), torch.from_numpy(exponents)
    else:
        codes = rng.integers(0, 127, format.grid(shape), np.uint8)
        grid, stored = E4M3[codes], tensor_of(codes, torch.float8_e4m3fn)
    row = np.arange(shape[-2]) // (format.rows or shape[-2])
    column = np.arange(shape[-1]) // (format.columns or shape[-1])
    return stored, grid[..., row[:, None], column[None, :]]


def assert_equal_bits(found: torch.Tensor, expected: npt.NDArray[np.float32]) -> None:
    """Compare a weight with float32 values, rounded to its dtype as integers."""
    stored = stored_as("F32" if found.dtype is torch.float32 else "BF16", expected)
    assert found.float().numpy().view(np.uint32).tolist() == floats_of(stored).view(np.uint32).tolist()


@given(format=FP8, leading=LEADING, rows=SIZES, columns=SIZES, dtype=DTYPES, slab=st.sampled_from([1, 64, 2**20]))
@settings(deadline=None, max_examples=200)
def test_fp8_weight_is_its_code_times_its_block_scale(
    format: WeightFormat, leading: tuple[int, ...], rows: int, columns: int, dtype: torch.dtype, slab: int
) -> None:
    rng = np.random.default_rng(rows * 41 + columns)
    shape = (*leading, rows, columns)
    codes = rng.choice(FINITE, shape)
    scale, each = scales_of(format, shape, rng)
    weight = QuantizedWeight(format, shape, "codes", "scale")
    tensors = {"codes": tensor_of(codes, torch.float8_e4m3fn), "scale": scale}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quantized_weights._SLABS, "cpu", slab)
        found = weight.values(tensors, torch.empty(0, dtype=dtype))
    assert_equal_bits(found, E4M3[codes] * each)


@given(
    format=st.sampled_from([NVFP4, MXFP4]),
    leading=LEADING,
    rows=SIZES,
    pairs=SIZES,
    dtype=DTYPES,
    divides=st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_fp4_weight_is_its_code_times_its_scales(
    format: WeightFormat, leading: tuple[int, ...], rows: int, pairs: int, dtype: torch.dtype, divides: bool
) -> None:
    rng = np.random.default_rng(rows * 41 + pairs)
    shape = (*leading, rows, 2 * pairs)
    codes = rng.integers(0, 256, (*leading, rows, pairs), np.uint8)
    scale, each = scales_of(format, shape, rng)
    expected = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(shape)] * each
    tensors = {"codes": torch.from_numpy(codes), "scale": scale}
    factor = None
    if format.has_global:
        of_matrices = rng.uniform(0.01, 100, leading).astype(np.float32)
        tensors["factor"], factor = torch.from_numpy(of_matrices.reshape(leading)), "factor"
        spread = of_matrices.reshape(*leading, 1, 1)
        expected = expected / spread if divides else expected * spread
    weight = QuantizedWeight(format, shape, "codes", "scale", factor, divides)
    assert_equal_bits(weight.values(tensors, torch.empty(0, dtype=dtype)), expected)


def test_every_fp8_and_fp4_code_decodes_to_its_value() -> None:
    eight = QuantizedWeight(fp8(1, None), (1, 254), "codes", "scale")
    tensors = {"codes": tensor_of(FINITE[None], torch.float8_e4m3fn), "scale": torch.ones(1, 1)}
    assert eight.values(tensors, torch.empty(0)).flatten().tolist() == E4M3[FINITE].tolist()
    four = QuantizedWeight(MXFP4, (1, 32), "codes", "scale")
    low_first = np.array([[low | low << 4 for low in range(16)]], np.uint8)
    tensors = {"codes": torch.from_numpy(low_first), "scale": torch.full((1, 1), 127, dtype=torch.uint8)}
    assert four.values(tensors, torch.empty(0)).flatten().tolist() == np.repeat(E2M1, 2).tolist()


def test_stacked_weights_may_share_one_scale() -> None:
    weight = QuantizedWeight(fp8(None, None), (3, 2, 4), "codes", "scale")
    codes = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    tensors = {"codes": tensor_of(codes, torch.float8_e4m3fn), "scale": torch.tensor(3.0)}
    assert_equal_bits(weight.values(tensors, torch.empty(0)), E4M3[codes] * np.float32(3))


@pytest.mark.parametrize(
    ("format", "shape", "usual", "others"),
    [
        (fp8(128, 128), (130, 64), (2, 1), [(2, 1, 1, 1)]),
        (fp8(None, None), (8, 8), (1, 1), [(1,), ()]),
        (fp8(None, None), (3, 8, 8), (3, 1, 1), [(3, 1), (3,), (1,), ()]),
        (fp8(1, None), (8, 4), (8, 1), [(8,)]),
        (fp8(1, None), (3, 8, 4), (3, 8, 1), [(3, 8)]),
        (NVFP4, (8, 40), (8, 3), []),
    ],
)
def test_published_scale_shapes_are_accepted(
    format: WeightFormat, shape: tuple[int, ...], usual: tuple[int, ...], others: list[tuple[int, ...]]
) -> None:
    found = format.scale_shapes(shape)
    assert found[0] == usual and set(others) <= set(found)
    assert (2, 2) not in found
