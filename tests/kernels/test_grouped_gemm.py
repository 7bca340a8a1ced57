"""Expert GEMMs and their weighted sum; kernels and references are compared with plain loops in float64.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from megatron_mamba_cache.kernels.experts import gemm_tiles, grouped_gemm_hopper
from megatron_mamba_cache.kernels.experts import grouped_gemm as grouped_gemm_module
from megatron_mamba_cache.kernels.experts import weighted_sum as weighted_sum_module
from megatron_mamba_cache.kernels.experts.expert_order import order_by_expert
from megatron_mamba_cache.kernels.experts.grouped_gemm import grouped_gemm, grouped_gemm_ref
from megatron_mamba_cache.kernels.experts.reference_experts import ExpertOrder
from megatron_mamba_cache.kernels.experts.weighted_sum import weighted_sum
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from tests.kernels.expert_layers import OPS, TOLERANCES, Layer, choice
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched
from tests.kernels.packed_batches import same_bits

HOPPER_SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("activation", ["squared_relu", "gated_silu", "none"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "hidden", "inside", "spread"),
    [
        (1, 3, 8, 64, 96, "random"),
        (7, 2, 5, 72, 40, "random"),
        (40, 2, 3, 48, 33, "random"),
        (19, 1, 4, 130, 64, "the same"),
        (2, 1, 1, 16, 16, "the same"),
    ],
)
def test_grouped_gemm_gives_the_weighted_sum_of_each_tokens_experts(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    inside: int,
    spread: str,
    dtype: torch.dtype,
    activation: str,
    ops: str,
    device: str,
) -> None:
    layer = Layer(num_experts, hidden, inside, activation, dtype).to(device)
    torch.manual_seed(0)
    x = torch.randn(num_tokens, hidden + 8).to(dtype)[:, :hidden].to(device)
    ids = choice(num_tokens, top_k, num_experts, spread).to(device)
    weights = torch.rand(num_tokens, top_k).to(device)
    out = layer.run(ops, x, ids, weights)
    expected = layer.expected(x, ids, weights)
    assert out.dtype == dtype and out.shape == (num_tokens, hidden)
    tolerance = TOLERANCES[dtype] * expected.abs().max().item()
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_expert_sum_scales_its_addend_by_the_last_routing_weight(ops: str, dtype: torch.dtype, device: str) -> None:
    total, generator = OPS[ops][1], torch.Generator().manual_seed(6)
    rows, addend = (torch.randn(number, 1030, generator=generator).to(dtype).to(device) for number in (10, 5))
    expert_rows = torch.tensor([[0, 3], [1, -1], [-1, -1], [9, 2], [4, 5]], dtype=torch.int32, device=device)
    weights = torch.rand(5, 3, generator=generator).to(device)
    own = weights[:, :2].contiguous()
    product = (addend.float() * weights[:, 2:]).to(dtype)  # rounded once, then added
    assert same_bits(total(rows, expert_rows, weights, addend), total(rows, expert_rows, own, product))
    assert same_bits(total(rows, expert_rows, weights), total(rows, expert_rows, own))
    with pytest.raises(ValueError, match=r"weights must be contiguous \[5, 2\], or \[5, 3\] with a shared expert"):
        weighted_sum(rows, expert_rows, torch.rand(5, 4).to(device))


@pytest.mark.parametrize("activation", ["squared_relu", "gated_silu"])
def test_grouped_gemm_of_a_token_is_bitwise_equal_in_any_batch(activation: str, device: str) -> None:
    layer = Layer(6, 80, 48, activation, torch.bfloat16).to(device)
    torch.manual_seed(3)
    x, ids = torch.randn(64, 80).bfloat16().to(device), choice(64, 2, 6, "random").to(device)
    weights = torch.rand(64, 2).to(device)
    together = layer.run("kernel", x, ids, weights)
    for rows in (slice(0, 1), slice(40, 41), slice(5, 30)):
        assert same_bits(layer.run("kernel", x[rows], ids[rows].contiguous(), weights[rows]), together[rows])


@pytest.mark.parametrize("ops", OPS)
def test_grouped_gemm_ignores_experts_on_other_ranks(ops: str, device: str) -> None:
    layer = Layer(6, 80, 48, "squared_relu", torch.float32).to(device)
    torch.manual_seed(5)
    x, ids, weights = torch.randn(9, 80).to(device), choice(9, 3, 6, "random").to(device), torch.rand(9, 3).to(device)
    addend = torch.randn(9, 80).to(device)
    product, total = OPS[ops]
    halves = []
    for first in (0, 3):
        order = order_by_expert(ids, 3, first)
        experts = slice(first, first + 3)
        inside = product(x, layer.first[experts], order, top_k=3, activation="squared_relu")
        known = weights.masked_fill(order.positions < 0, float("nan"))  # other ranks' weights must not be used
        halves.append(total(product(inside, layer.second[experts], order), order.positions, known, addend))
    expected = layer.expected(x, ids, weights) + 2 * addend.double().cpu()
    torch.testing.assert_close(sum(halves).double().cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["squared_relu", "gated_silu"])
@pytest.mark.parametrize("num_tokens", [40, 130])
def test_grouped_gemm_is_accurate_with_many_rows_per_expert(activation: str, num_tokens: int, device: str) -> None:
    layer = Layer(2, 64, 96, activation, torch.bfloat16).to(device)
    torch.manual_seed(6)
    x, ids = torch.randn(num_tokens, 64).bfloat16().to(device), choice(num_tokens, 1, 2, "random").to(device)
    weights = torch.rand(num_tokens, 1).to(device)
    expected = layer.expected(x, ids, weights)
    out = layer.run("kernel", x, ids, weights)
    tolerance = 2e-2 * expected.abs().max().item()
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("activation", ["squared_relu", "gated_silu", "none"])
@pytest.mark.parametrize(
    ("inside", "num_programs", "unused"),
    [
        (192, 132, 0),
        # The portable kernel, which the interpreter runs, has the same tiles for any number of programs.
        *[
            pytest.param(*case, marks=[pytest.mark.slow] if INTERPRETED else [])
            for case in [(320, 3, 0), (352, 3, 0), (256, 3, 20), (224, 3, 20)]
        ],
        (448, 3, 20),
    ],
)
def test_grouped_gemm_matches_the_reference_for_any_row_counts(
    activation: str, inside: int, num_programs: int, unused: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few programs, output tiles are wide and the last is narrower: for 320 outputs, or 352 if gated.

    If many experts have no rows, so that the mean is small, two of three tiles are narrower for 448 outputs, or 224 if
    gated, and each row tile starts at another output tile. For 256 outputs both tiles are narrow, unless gated.
    """
    monkeypatch.setattr(grouped_gemm_hopper, "num_multiprocessors", lambda device: num_programs)
    lengths = (0, 1, 16, 17, 31, 33, 64, 65, 100, 129, 161, 224, 225, 0, 700, *(0,) * unused)
    layer = Layer(len(lengths), 128, inside, activation, torch.bfloat16).to(device)
    ids = torch.cat([torch.full((length, 1), expert) for expert, length in enumerate(lengths)]).to(torch.int32)
    torch.manual_seed(7)
    ids = ids[torch.randperm(len(ids))].to(device)
    x = torch.randn(len(ids), 128).bfloat16().to(device)
    order = order_by_expert(ids, len(lengths))
    inner = grouped_gemm(x, layer.first, order, top_k=1, activation=activation)
    for found, given, weight, settings in (
        (inner, x, layer.first, {"top_k": 1, "activation": activation}),
        (grouped_gemm(inner, layer.second, order), inner, layer.second, {}),
    ):
        expected = grouped_gemm_ref(given.cpu().float(), weight.cpu().float(), order_on_cpu(order), **settings)
        tolerance = 1e-2 * expected.abs().max().item()
        torch.testing.assert_close(found.cpu().float(), expected, rtol=0, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("activation", ["squared_relu", "gated_silu"])
@pytest.mark.parametrize("inside", [192, 352])
def test_grouped_gemm_row_is_bit_equal_for_any_row_count_of_its_expert(
    activation: str, inside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles have 32 to 224 rows, and a row may be in either half of a tile whose groups share weights."""
    monkeypatch.setattr(grouped_gemm_hopper, "num_multiprocessors", lambda device: 3)
    layer = Layer(8, 512, inside, activation, torch.bfloat16).to("cuda")
    torch.manual_seed(11)
    x, looked_at = torch.randn(1400, 512).bfloat16().cuda(), torch.randn(5, 512).bfloat16().cuda()
    found = []
    for num_own in (5, 17, 40, 100, 150, 224, 230, 449, 700):
        # One expert gets so many tokens; the first and the last of them are compared.
        ids = torch.full((1400, 1), 3, dtype=torch.int32)
        ids[num_own:, 0] = torch.arange(1400 - num_own) % 3
        order = order_by_expert(ids.cuda(), 8)
        x[:5] = x[num_own - 5 : num_own] = looked_at
        rows = grouped_gemm(x, layer.first, order, top_k=1, activation=activation)
        found += [rows[order.positions[tokens, 0].long()] for tokens in (slice(0, 5), slice(num_own - 5, num_own))]
    assert all(same_bits(rows, found[0]) for rows in found)


@pytest.mark.parametrize(
    ("outputs", "is_gated", "takes"),
    [
        (200, False, True),
        (200, True, False),
        (208, True, True),
        (72, False, True),
        (64, False, False),
        (64, True, False),
    ],
)
def test_long_gemm_tiles_are_chosen_only_for_weights_of_suitable_size(
    outputs: int, is_gated: bool, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_tiles, "can_load_boxes", lambda weight: True)
    monkeypatch.setattr(gemm_tiles, "has_tested_gluon", lambda: True)
    x, weight = torch.zeros(64, 128).bfloat16(), torch.zeros(2, outputs, 128).bfloat16()
    assert gemm_tiles.takes_long_tiles(x, weight, 64, is_gathered=True, is_gated=is_gated) == takes


def order_on_cpu(order: ExpertOrder) -> ExpertOrder:
    return ExpertOrder(order.pairs.cpu(), order.positions.cpu(), order.starts.cpu())


def test_grouped_gemm_accepts_zero_tokens(device: str) -> None:
    layer = Layer(3, 16, 16, "none", torch.float32).to(device)
    ids = torch.zeros(0, 2, dtype=torch.int32, device=device)
    assert layer.run("kernel", torch.zeros(0, 16, device=device), ids, ids.float()).shape == (0, 16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight": torch.zeros(2, 4, 7)}, r"\[experts, outputs, inputs\]"),
        ({"weight": torch.zeros(3, 4, 8)}, r"order.starts must have shape \[4\]"),
        ({"weight": torch.zeros(2, 4, 8).bfloat16()}, "the same dtype"),
        ({"weight": torch.zeros(2, 4, 16)[:, :, ::2]}, "contiguous"),
        (
            {"weight": torch.zeros(2, 5, 8), "activation": "gated_silu"},
            r"2 \* outputs, inputs\] for gated_silu, found \(2, 5, 8\)",
        ),
    ],
)
def test_grouped_gemm_refuses_mismatched_arguments(changes: dict, reason: str) -> None:
    order = order_by_expert(torch.zeros(3, 1, dtype=torch.int32), 2)
    arguments = {"x": torch.zeros(3, 8), "weight": torch.zeros(2, 4, 8), "order": order, "top_k": 1} | changes
    with pytest.raises(ValueError, match=reason):
        grouped_gemm(**arguments)


@pytest.mark.parametrize("activation", ["squared_relu", "gated_silu"])
@pytest.mark.parametrize("loads_boxes", [True, False])
def test_grouped_gemm_does_not_recompile_for_other_token_counts(
    activation: str,
    loads_boxes: bool,
    compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gemm_tiles, "can_load_boxes", lambda weight: loads_boxes)
    monkeypatch.setattr(gemm_tiles, "has_tested_gluon", lambda: False)  # disables long tiles
    products = compile_for_hopper(grouped_gemm_module, "_grouped_gemm_kernel")
    sums = compile_for_hopper(weighted_sum_module, "_weighted_sum_kernel")
    layer = Layer(16, 128, 256, activation, torch.bfloat16)
    tokens = (1, 2, 16, 33, 127, 300, 700)
    for num_tokens in tokens:
        ids = choice(num_tokens, 2, 16, "random")
        layer.run("kernel", torch.zeros(num_tokens, 128).bfloat16(), ids, torch.zeros(num_tokens, 2))
    assert len(products.ptx) == 2 * len(tokens) and len(sums.compiled) == 1
    assert len(products.compiled) == 2 * 2  # variants of each GEMM
    for ptx in products.ptx:
        assert ".local." not in ptx and ("cp.async.bulk" in ptx) == loads_boxes
        assert "wgmma" in ptx


# Each variant takes many seconds to compile; by default only the one that needs most registers is tested.
@pytest.mark.parametrize(
    ("activation", "is_gathered"),
    [
        ("gated_silu", True),
        pytest.param("squared_relu", True, marks=pytest.mark.slow),
        pytest.param("none", False, marks=pytest.mark.slow),
    ],
)
def test_long_tile_gemm_does_not_recompile_for_other_token_counts(
    activation: str,
    is_gathered: bool,
    compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gemm_tiles, "can_load_boxes", lambda weight: True)
    monkeypatch.setattr(grouped_gemm_hopper, "num_multiprocessors", lambda device: 4)  # few programs: wide tiles
    products = compile_for_hopper(grouped_gemm_hopper, "_gemm_kernel")
    monkeypatch.setattr(grouped_gemm_module, "launches_kernel", lambda tensor: True)
    weight = Layer(16, 128, 352, activation, torch.bfloat16).first
    for num_tokens in (800, 801, 2000):
        order = order_by_expert(choice(num_tokens, 2, 16, "random"), 16)
        x = torch.zeros(num_tokens if is_gathered else 2 * num_tokens, 128).bfloat16()
        grouped_gemm(x, weight, order, top_k=2 if is_gathered else None, activation=activation)
    assert len(products.ptx) == 3 and len(products.compiled) == 1
    assert "cp.async.bulk" in products.ptx[0] and ".local." not in products.ptx[0]
    assert all(shape in products.ptx[0] for shape in ("m64n224k16", "m64n112k16"))  # for own and for shared weights
    assert "wgmma.wait_group.sync.aligned 1;" in products.ptx[0]
    assert products.shared_bytes[0] <= HOPPER_SHARED_BYTES
    # `check_addresses` writes a mark to the rows and to the weights, and its PTX reads them; rows must come first.
    addresses = marked_addresses(products.ptx[0])
    print(f"addresses of marks: {addresses}; {products.shared_bytes[0]} bytes")
    first_weight, after_weights = (3 * 256 + 224) * 128, (3 * 256 + 224 + 4 * 192) * 128
    assert min(addresses[0x40004000]) - min(addresses[0x3F803F80]) == first_weight
    # The buffers for 16 rows of results per warp group follow.
    assert products.shared_bytes[0] >= after_weights + 2 * 16 * (32 if activation == "gated_silu" else 64) * 2


def marked_addresses(ptx: str) -> dict[int, set[int]]:
    """Return the shared-memory addresses to which PTX stores 16-byte constants, by their first four bytes.

    Addresses are byte offsets from one register; Triton 3.7 and 3.8 keep constants and sums in further registers.
    """
    constants = {name: int(value) for name, value in re.findall(r"mov\.b32\s+(%r\d+), (-?\d+);", ptx)}
    sums = {name: (base, int(step)) for name, base, step in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx)}
    stores = re.findall(r"st\.shared(?:::cta)?\.v4\.b32\s+\[ ?(%r\d+)(?: ?\+ ?(\d+))? ?\], \{ ?([%r\d]+),", ptx)
    found = [
        (*sums.get(register, (register, 0)), int(step or 0), constants.get(value) or int(value))
        for register, step, value in stores
        if value in constants or value.isdecimal()
    ]
    assert len({base for base, *_ in found}) == 1
    addresses = defaultdict(set)
    for _, first, step, value in found:
        addresses[value].add(first + step)
    return addresses
