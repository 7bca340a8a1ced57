"""The PTX that decodes NVFP4 and MXFP4 words, carried out one operation at a time, gives codes times scales."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from megatron_mamba_cache.kernels.experts.quantized_operands import DECODE_MXFP4, MXFP4_SCALES
from megatron_mamba_cache.kernels.quantized.fp4_codes import DECODE_QUADS, NVFP4_SCALES
from megatron_mamba_cache.kernels.quantized.quantized_matrix import RUN, decoded, packed

HALVES = (0, 16)
Quads = tuple[np.ndarray, dict[int, np.ndarray]]


def bf16_products(given: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the products of pairs of bf16 numbers, which must be exact."""
    found = np.zeros_like(given)
    for half in HALVES:
        values = [((pair >> half & 0xFFFF) << 16).astype(np.uint32).view(np.float32) for pair in (given, factors)]
        bits = (values[0] * values[1]).view(np.uint32).astype(np.uint64)
        assert not (bits & 0xFFFF).any()
        found |= bits >> 16 << half
    return found


def permuted(given: np.ndarray, selector: int) -> np.ndarray:
    """Return the chosen bytes of words."""
    octets = [given >> (8 * (selector >> (4 * number) & 7)) & 0xFF for number in range(4)]
    return octets[0] | octets[1] << 8 | octets[2] << 16 | octets[3] << 24


def execute(ptx: str, registers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the registers after PTX without branches; words are uint64 arrays below 2^32."""

    def value(name: str) -> np.ndarray:
        return np.array(int(name, 0), dtype=np.uint64) if name[0].isdigit() else registers[name]

    for line in re.findall(r"[^{};]*(?:\{[^{};]*\}[^{};]*)*;", re.sub(r"^\s*\{|\}\s*$", "", ptx)):
        operation, _, operands = line.strip("; \n").partition(" ")
        names = [name.strip() for name in re.findall(r"\{[^}]*\}|[^,\s]+", operands)]
        if operation == ".reg":
            continue
        kind, given = operation.split(".")[0], names[1:]
        if kind == "mov" and names[0].startswith("{"):
            for half, name in zip(HALVES, names[0].strip("{}").split(","), strict=True):
                registers[name.strip()] = value(given[0]) >> half & 0xFFFF
            continue
        if kind == "mov" and given[0].startswith("{"):
            parts = [value(name.strip()) for name in given[0].strip("{}").split(",")]
            found = parts[0] | parts[1] << 16
        elif kind == "mov":
            found = value(given[0])
        elif kind == "prmt":
            assert given[1] == "0"
            found = permuted(value(given[0]), int(given[2], 0))
        elif operation == "mul.bf16x2":
            found = bf16_products(*np.broadcast_arrays(value(given[0]), value(given[1])))
        else:
            first, second = value(given[0]), value(given[1])
            operations = {"and": np.bitwise_and, "shl": np.left_shift, "shr": np.right_shift, "mul": np.multiply}
            found = operations[kind](first, second)
        registers[names[0]] = found & np.uint64(0xFFFFFFFF)
    return registers


@pytest.fixture(scope="module")
def scales() -> torch.Tensor:
    """Return all scales that NVFP4 may have."""
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_scales_become_pairs_of_bf16_numbers(scales: torch.Tensor) -> None:
    fours = [np.roll(np.arange(127, dtype=np.uint64), number) for number in range(4)]
    four = fours[0] | fours[1] << 8 | fours[2] << 16 | fours[3] << 24
    registers = execute(NVFP4_SCALES.value, {"$4": four})
    for number, codes in enumerate(fours):
        expected = scales.float().numpy()[codes.astype(int)] * 2.0**110
        for half in HALVES:
            bits = (registers[f"${number}"] >> half & 0xFFFF) << 16
            assert (bits.astype(np.uint32).view(np.float32) == expected).all()


@pytest.fixture(scope="module")
def quads() -> Quads:
    """Return all words of four codes, each below another one, and by the half that a word is in, its four values."""
    four = torch.cartesian_prod(*[torch.arange(16, dtype=torch.uint8)] * 4)
    codes = four.view(-1, RUN, 4).transpose(1, 2)
    words = packed(codes.flatten(1), 4).flatten().numpy().view(np.uint16).astype(np.uint64)
    values = decoded(four, 4).numpy()
    return words | np.roll(words, 12345) << 16, {0: values, 16: np.roll(values, 12345, axis=0)}


def assert_products(ptx: str, registers: dict[str, np.ndarray], quads: Quads, factors: Sequence[float]) -> None:
    """Check the bits of all four products of all words and a factor for each."""
    words, values = quads
    found = execute(ptx, {"$4": words} | registers)
    for number, factor in enumerate(factors):
        for half in HALVES:
            bits = ((found[f"${number}"] >> half & 0xFFFF) << 16).astype(np.uint32)
            assert (bits == (values[half][:, number] * np.float32(factor)).view(np.uint32)).all()


def test_every_code_of_a_word_is_multiplied_by_every_scale_of_nvfp4(scales: torch.Tensor, quads: Quads) -> None:
    for first in range(127):
        codes = [(first + 29 * number) % 127 for number in range(4)]  # another scale for each number
        four = np.array([sum(code << 8 * number for number, code in enumerate(codes))], dtype=np.uint64)
        expanded = execute(NVFP4_SCALES.value, {"$4": four})
        registers = {f"${5 + 2 * number}": expanded[f"${number}"] for number in range(4)}
        assert_products(DECODE_QUADS.value, registers, quads, [float(scales[code]) * 2.0**-16 for code in codes])


def test_every_code_of_a_word_is_multiplied_by_scales_of_mxfp4(quads: Quads) -> None:
    for first in range(1, 250):
        pair = np.array([first | (first + 2) << 8], dtype=np.uint64)
        expanded = execute(MXFP4_SCALES.value, {"$2": pair})
        registers = {"$5": expanded["$0"], "$7": expanded["$1"]}
        factors = [2.0 ** (first - 127)] * 2 + [2.0 ** (first - 125)] * 2
        assert_products(DECODE_MXFP4.value, registers, quads, factors)
