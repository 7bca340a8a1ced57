"""Products of fixed order: a token's bits do not depend on the other tokens, in kernels and in the torch twin."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from megatron_mamba_cache.kernels.activations import Activation, activated_ref
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.kernels.linear import fixed_order_gemm as gemm_module
from megatron_mamba_cache.kernels.linear.fixed_order_gemm import fixed_order_gemm, fixed_order_gemm_ref
from megatron_mamba_cache.kernels.linear.fixed_order_tiles import FixedOrderTiles, num_counters, num_parts
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched, launches_expected
from tests.kernels.packed_batches import same_bits

OPS = ("kernel", "reference")
WEIGHTS = {"one part": (200, 136), "two parts": (72, 1088), "three parts": (136, 1600)}
"""Outputs and inputs."""
PUBLISHED = {
    "8B Mamba in": (18_560, 4096),
    "8B Mamba out": (4096, 8192),
    "8B up": (21_504, 4096),
    "8B down": (4096, 21_504),
    "Nano Mamba in": (10_304, 2688),
    "Nano Mamba out": (2688, 4096),
    "Nano shared down": (2688, 3712),
    "27B gate and up": (34_816, 5120),
    "27B down": (5120, 17_408),
    "27B out": (5120, 6144),
    "35B projections": (12_288, 2048),
    "35B out": (2048, 4096),
    "35B shared down": (2048, 512),
}


def operands(num_tokens: int, outputs: int, inputs: int, device: str) -> tuple[Tensor, Tensor]:
    """Return tokens of different magnitudes, whose rows are not contiguous, and a weight."""
    generator = torch.Generator(device).manual_seed(num_tokens + outputs + inputs)
    x = torch.randn(num_tokens, inputs + 8, generator=generator, device=device)
    x *= torch.logspace(-2, 2, num_tokens, device=device)[:, None]
    weight = torch.randn(outputs, inputs, generator=generator, device=device) / inputs**0.5
    return x.bfloat16()[:, :inputs], weight.bfloat16()


def product(op: str, x: Tensor, weight: Tensor, tiles: FixedOrderTiles | None = None, **settings: Any) -> Tensor:
    if op == "reference":
        return fixed_order_gemm_ref(x, weight, **settings)
    counters = torch.zeros(num_counters(weight), dtype=torch.int32, device=x.device)
    found = fixed_order_gemm(x, weight, counters, tiles=tiles, **settings)
    assert not counters.any()
    return found


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", ["none", "squared_relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 37])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_fixed_order_gemm_is_the_product(
    weight: str, num_tokens: int, dtype: torch.dtype, activation: Activation, op: str, device: str
) -> None:
    x, matrix = operands(num_tokens, *WEIGHTS[weight], device)
    name = "_split_kernel" if num_tokens <= 16 or not INTERPRETED else "_whole_kernel"
    of_kernel = op == "kernel" and num_tokens > 0
    with launches_expected(gemm_module, name, of_kernel=of_kernel, device=device):
        found = product(op, x, matrix, activation=activation, dtype=dtype)
    expected = activated_ref(x.double() @ matrix.double().t(), activation)
    assert found.dtype == dtype and found.shape == expected.shape
    bound = expected.abs().amax(-1, keepdim=True) if num_tokens else expected
    assert ((found - expected).abs() <= (2**-8 if dtype is torch.bfloat16 else 2**-14) * bound).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_bits_of_a_token_depend_on_no_other_token(weight: str, op: str, device: str) -> None:
    x, matrix = operands(37, *WEIGHTS[weight], device)
    together = product(op, x, matrix, dtype=torch.float32)
    for first, last in ((0, 1), (20, 21), (5, 8), (17, 33), (0, 37)):
        assert same_bits(product(op, x[first:last], matrix, dtype=torch.float32), together[first:last])


@pytest.mark.parametrize("op", OPS)
def test_values_that_are_not_finite_stay_in_their_token(op: str, device: str) -> None:
    x, matrix = operands(19, *WEIGHTS["two parts"], device)
    expected, x = product(op, x, matrix), x.clone()
    x[3, 7], x[9, 1000], x[18] = torch.nan, torch.inf, -torch.inf
    found, is_finite = product(op, x, matrix), torch.ones(19, dtype=torch.bool)
    is_finite[[3, 9, 18]] = False
    assert same_bits(found[is_finite], expected[is_finite])
    assert not found[~is_finite].isfinite().any()


def test_parts_that_follow_the_number_of_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if not INTERPRETED and device == "cpu":
        pytest.skip("the reference has no parts")
    x, matrix = operands(37, *WEIGHTS["three parts"], device)
    alone = product("kernel", x[:1], matrix, dtype=torch.float32)
    monkeypatch.setattr(gemm_module, "num_parts", lambda outputs, inputs: 2)
    assert not same_bits(product("kernel", x, matrix, dtype=torch.float32)[:1], alone)


def test_weights_with_few_outputs_have_more_parts() -> None:
    assert [num_parts(*WEIGHTS[name]) for name in WEIGHTS] == [1, 2, 3]
    assert {name: num_parts(*shape) for name, shape in PUBLISHED.items() if num_parts(*shape) > 1} == {
        "8B Mamba out": 2,
        "8B down": 2,
        "Nano Mamba out": 3,
        "Nano shared down": 3,
        "27B down": 2,
        "27B out": 2,
        "35B out": 3,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 24, dtype=torch.bfloat16)}, r"found torch.Size\(\[2, 24\]\)"),
        ({"x": torch.zeros(2, 16)}, "must be bf16"),
        ({"x": torch.zeros(2, 20, dtype=torch.bfloat16)[:, :16]}, "aligned to 16 bytes"),
        ({"x": torch.zeros(2, 24, dtype=torch.bfloat16)[:, 4:20]}, "aligned to 16 bytes"),
        ({"weight": torch.zeros(16, 8, dtype=torch.bfloat16).t()}, r"with strides \(1, 8\)"),
        ({"counters": torch.zeros(1, dtype=torch.int32)}, "need 2 int32 counters, found 1"),
        ({"activation": "gated_silu"}, "apply it to the result"),
    ],
)
def test_fixed_order_gemm_refuses(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "x": torch.zeros(2, 16, dtype=torch.bfloat16),
        "weight": torch.zeros(8, 16, dtype=torch.bfloat16),
        "counters": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        fixed_order_gemm(**(given | changes))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", PUBLISHED)
def test_bits_are_the_same_in_all_tiles_of_published_weights(shape: str) -> None:
    x, matrix = operands(4096, *PUBLISHED[shape], "cuda")
    together = product("kernel", x, matrix, dtype=torch.float32)
    exact = fixed_order_gemm_ref(x[::512], matrix, dtype=torch.float32)
    assert ((together[::512] - exact).abs() <= 2**-12 * exact.abs().amax(-1, keepdim=True)).all()
    for count in (1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 127, 129, 200, 256, 257, 700, 2048):
        for first in {0, 1, 300, 4096 - count, (3 * count) % (4097 - count)} - set(range(4097 - count, 4096)):
            found = product("kernel", x[first : first + count], matrix, dtype=torch.float32)
            assert same_bits(found, together[first : first + count]), (count, first)


@pytest.mark.parametrize("num_tokens", [1, 16, 32, 64, 65, 256, 257, 4096])
def test_all_tiles_compile_to_the_same_tensor_core_steps_without_spills(
    num_tokens: int,
    compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = [compile_for_hopper(gemm_module, name) for name in ("_split_kernel", "_whole_kernel")]
    monkeypatch.setattr(gemm_module, "overlapping", lambda device: {"OVERLAPS": True, "launch_pdl": True})
    for outputs, inputs in ((21_504, 4096), (2688, 4096)):
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16)
        counters = torch.zeros(num_counters(weight), dtype=torch.int32)
        fixed_order_gemm(torch.empty(num_tokens, inputs, dtype=torch.bfloat16), weight, counters)
    cubins = [cubin for kernel in kernels for cubin in kernel.cubins]
    assert len(cubins) == 2
    for number, cubin in enumerate(cubins):
        file = tmp_path / f"{number}.cubin"
        file.write_bytes(cubin)
        code, use = (_listing(option, file) for option in ("-sass", "-res-usage"))
        assert re.search(r"STACK:0\b", use)
        products = set(re.findall(r"\b[A-Z]*MMA\.\S+", code))
        assert products and all(re.fullmatch(r"HGMMA\.64x\d+x16\.F32\.BF16", name) for name in products)


def _listing(option: str, file: Path) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
