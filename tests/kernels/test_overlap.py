"""Kernels that start before the previous kernel ends access no memory until it has ended."""

import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from megatron_mamba_cache.kernels import activations, one_token, overlap
from megatron_mamba_cache.kernels.attention import attention_inputs, kv_append, output_gate
from megatron_mamba_cache.kernels.attention.head_changes import HeadChanges, HeadNorms, Rotation
from megatron_mamba_cache.kernels.experts import (
    expert_order,
    gemm_tiles,
    grouped_gemm,
    grouped_gemm_hopper,
    pair_gemms,
    router_logits,
    routing,
    summed_gemms,
    weighted_sum,
)
from megatron_mamba_cache.kernels.experts.reference_experts import ExpertOrder
from megatron_mamba_cache.kernels.experts.routing_rule import RoutingRule
from megatron_mamba_cache.kernels.norm import gated_norm, norm_and_gate, residual_norm
from megatron_mamba_cache.kernels.sampling import greedy_draws, verification
from megatron_mamba_cache.kernels.sampling.verification import VerifyLogits
from megatron_mamba_cache.recurrences.batches import full_sequences
from megatron_mamba_cache.recurrences.conv import conv
from megatron_mamba_cache.recurrences.conv import verify as conv_verify
from megatron_mamba_cache.recurrences.mamba2 import tiles, verify
from megatron_mamba_cache.recurrences.request_tiles import tile_shape
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched
from tests.kernels.packed_batches import VerifySpec, pack_verify
from tests.kernels.ssm_steps import SSMShape, random_steps

ROWS = pack_verify([VerifySpec(1, (0,))], "cpu")
PROMPT = full_sequences(1, 4, 64, torch.device("cpu"))


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def update_states(*, after_conv: bool = False) -> object:
    shape = SSMShape(heads=2, head_dim=64, d_state=128, groups=1)
    steps = random_steps(1, "cpu", shape, dtype=torch.bfloat16)
    pool = torch.zeros(1, *shape.state)
    return verify.state_verify(steps.tokens, steps.weights, pool, ROWS, after_conv=after_conv)


def cut_prompt() -> object:
    steps = random_steps(4, "cpu", SSMShape(heads=2, head_dim=64, d_state=128, groups=1), dtype=torch.bfloat16)
    tile = tile_shape(64, torch.bfloat16)
    assert tile is not None
    return tiles.cut_tiles(steps.tokens.dt, steps.weights, PROMPT, tile, 64, torch.bfloat16)


def sum_after_pairs() -> object:
    rows, shared = {"shared_rows": half(1, 1024), "shared_weight": half(128, 1024)}, torch.zeros(1, 2)
    return summed_gemms.summed_gemm(half(2, 64), half(4, 128, 64), int32(1, 2), shared, follows_pairs=True, **rows)


def shared_gemms() -> object:
    return pair_gemms.pair_gemm(half(1, 64), half(4, 128, 64), int32(1, 2), half(128, 64))


def change_heads() -> object:
    norms, rotation = HeadNorms(half(64), half(64), 1e-6), Rotation(half(3, 2, 16), torch.zeros(1, dtype=torch.int64))
    heads = half(1, 2, 4, 64), half(1, 2, 64), half(1, 2, 64)
    caches, slots = (half(2, 16, 2, 64), half(2, 16, 2, 64)), (int32(1), int32(1))
    return attention_inputs.write_attention_inputs(*heads, *caches, *slots, HeadChanges(norms, rotation))


ORDER_OF_MANY = ("_count_kernel", "_sum_counts_kernel", "_scatter_kernel")
"""Kernels that `order_by_expert` launches for many pairs."""


def overlapped_ptx(
    module: ModuleType,
    kernel: str,
    launch: Callable[[], object],
    compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Compile a launch's kernel for a device on which kernels overlap, and return its PTX."""
    monkeypatch.setattr(module, "overlapping", lambda device: {"OVERLAPS": True, "launch_pdl": True})
    compiled = compile_for_hopper(module, kernel)
    if kernel in ORDER_OF_MANY:
        for other in set(ORDER_OF_MANY) - {kernel}:
            compile_for_hopper(module, other)
    launch()
    (ptx,) = compiled.ptx
    return ptx


ORDER = ExpertOrder(int32(2), int32(1, 2), int32(5))
LAUNCHES: dict[tuple[ModuleType, str], Callable[[], object]] = {
    (gated_norm, "_gated_group_norm_kernel"): lambda: gated_norm.gated_group_norm(
        half(1, 64), None, half(64), 64, 1e-5
    ),
    (norm_and_gate, "_norm_and_gate_kernel"): lambda: norm_and_gate.norm_and_gate(
        half(1, 128), half(1, 128), half(64), 1e-6
    ),
    (router_logits, "_logits_kernel"): lambda: router_logits.router_logits(half(2, 64), half(4, 64)),
    (routing, "_route_kernel"): lambda: routing.route(torch.zeros(1, 1, 4), None, RoutingRule(top_k=2)),
    (expert_order, "_order_kernel"): lambda: expert_order.order_by_expert(int32(1, 2), 4),
    **{(expert_order, kernel): lambda: expert_order.order_by_expert(int32(2049, 2), 4) for kernel in ORDER_OF_MANY},
    (grouped_gemm, "_grouped_gemm_kernel"): lambda: grouped_gemm.grouped_gemm(
        half(1, 64), half(4, 128, 64), ORDER, top_k=2
    ),
    (summed_gemms, "_sum_kernel"): lambda: summed_gemms.summed_gemm(
        half(2, 64), half(4, 128, 64), int32(1, 2), torch.zeros(1, 2)
    ),
    (gemm_tiles, "_tiles_kernel"): lambda: gemm_tiles.tile_rows(int32(5), 2),
    (greedy_draws, "_best_of_tiles_kernel"): lambda: greedy_draws.best_of_tiles(half(1, 64)),
    (greedy_draws, "_best_of_row_kernel"): lambda: greedy_draws.best_of_rows(torch.zeros(1, 2), int32(1, 2)),
    (verification, "_accept_kernel"): lambda: verification.accept_matching(
        torch.zeros(2, dtype=torch.int64), VerifyLogits(int32(3), torch.zeros(2, dtype=torch.int64), max_drafts=1)
    ),
    (weighted_sum, "_weighted_sum_kernel"): lambda: weighted_sum.weighted_sum(
        half(2, 64), int32(1, 2), torch.zeros(1, 2)
    ),
    (activations, "_squared_relu_kernel"): lambda: activations.squared_relu(half(1, 64)),
    (activations, "_gated_silu_kernel"): lambda: activations.gated_silu(half(1, 64)),
    (verify, "_state_verify_kernel"): update_states,
    (conv, "_causal_conv_kernel"): lambda: conv.causal_conv(half(4, 64), half(64, 4), half(64), half(1, 3, 64), PROMPT),
    (kv_append, "_append_kv_kernel"): lambda: kv_append.append_kv(
        half(1, 2, 64), half(1, 2, 64), half(2, 16, 2, 64), half(2, 16, 2, 64), int32(1), int32(1)
    ),
    (attention_inputs, "_inputs_kernel"): change_heads,
    (output_gate, "_gate_kernel"): lambda: output_gate.gate_output(half(1, 8, 64), half(1, 2, 4, 64)),
}


@pytest.mark.parametrize(("module", "kernel"), LAUNCHES, ids=[name for _, name in LAUNCHES])
def test_kernel_launched_early_accesses_no_memory_before_its_wait(
    module: ModuleType,
    kernel: str,
    compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ptx = overlapped_ptx(module, kernel, LAUNCHES[module, kernel], compile_for_hopper, monkeypatch)
    before, waits, after = ptx.partition("griddepcontrol.wait")
    assert waits and "griddepcontrol.launch_dependents" in before
    accesses = r"\b(?:ld|st|atom|red)\.(?:global|shared)|cp\.async"
    assert not re.search(accesses, before) and re.search(accesses, after)


# The variant that gathers rows takes many seconds to compile.
@pytest.mark.parametrize("top_k", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_long_tile_gemm_waits_for_the_previous_kernel_before_the_next_may_start(
    top_k: int | None,
    compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next kernel may start only after this wait, because it reads the same row tiles without a wait."""
    monkeypatch.setattr(grouped_gemm_hopper, "num_multiprocessors", lambda device: 132)
    order = ExpertOrder(int32(80), int32(40, 2), int32(3))
    ptx = overlapped_ptx(
        grouped_gemm_hopper,
        "_gemm_kernel",
        lambda: grouped_gemm_hopper.multiply_on_hopper(
            half(80, 128), half(2, 128, 128), order, half(80, 128), top_k=top_k, activation="none", follows_first=False
        ),
        compile_for_hopper,
        monkeypatch,
    )
    before, waits, after = ptx.partition("griddepcontrol.wait")
    accesses = r"\b(?:ld|st|atom|red)\.global|cp\.async"
    assert waits and not re.search(accesses, before) and re.search(accesses, after)
    assert "griddepcontrol.launch_dependents" not in before and "griddepcontrol.launch_dependents" in after


@pytest.mark.parametrize(
    ("module", "kernel", "launch", "num_elements"),
    [
        (one_token, "_one_token_kernel", lambda: one_token.multiply_one_token(half(1, 1024), half(64, 1024)), 2048),
        (
            one_token,
            "_one_token_kernel",
            lambda: one_token.multiply_one_token(half(1, 1024), half(64, 1024), "gated_silu"),
            2048,
        ),
        (
            residual_norm,
            "_add_and_norm_kernel",
            lambda: residual_norm.add_and_norm(half(1, 1024), half(1, 1024), half(1024), 1e-5),
            1024,
        ),
    ],
    ids=["plain", "gated", "norm"],
)
def test_kernel_launched_early_reads_only_weights_before_its_wait(
    module: ModuleType,
    kernel: str,
    launch: Callable[[], object],
    num_elements: int,
    compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ptx = overlapped_ptx(module, kernel, launch, compile_for_hopper, monkeypatch)
    before, _, after = ptx.partition("griddepcontrol.wait")
    assert len(re.findall(r"\bld\.global", before)) == num_elements // (128 * 8)  # 128 threads load 16 bytes each
    assert not re.search(r"\b(?:st|atom|red)\.|cp\.async", before) and "ld.global" in after


@pytest.mark.parametrize(
    ("module", "kernel", "launch"),
    [
        (
            conv_verify,
            "_conv_verify_kernel",
            lambda: conv_verify.conv_verify(half(1, 64), half(64, 4), half(64), half(1, 3, 64), ROWS),
        ),
        (tiles, "_tiles_kernel", cut_prompt),
        (
            pair_gemms,
            "_pairs_kernel",
            lambda: pair_gemms.pair_gemm(half(1, 64), half(4, 128, 64), int32(1, 2)),
        ),
    ],
    ids=["conv", "cutting of rows", "pairs"],
)
def test_kernel_waits_before_it_lets_the_next_kernel_start(
    module: ModuleType,
    kernel: str,
    launch: Callable[[], object],
    compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next kernel may then read everything that this kernel does not write, without a wait."""
    ptx = overlapped_ptx(module, kernel, launch, compile_for_hopper, monkeypatch)
    before, waits, after = ptx.partition("griddepcontrol.wait")
    assert waits and not re.search(r"\b(?:ld|st)\.(?:global|shared)|griddepcontrol", before)
    assert "griddepcontrol.launch_dependents" in after


def test_kernels_are_not_launched_early_on_a_cpu() -> None:
    assert overlap.overlapping(torch.device("cpu")) == {"OVERLAPS": False}


@pytest.mark.parametrize(
    ("module", "kernel", "launch"),
    [
        (verify, "_state_verify_kernel", lambda: update_states(after_conv=True)),
        (summed_gemms, "_sum_kernel", sum_after_pairs),
        (pair_gemms, "_pairs_kernel", shared_gemms),
    ],
    ids=["states", "sum", "pairs"],
)
def test_kernel_launched_early_writes_nothing_before_its_wait(
    module: ModuleType,
    kernel: str,
    launch: Callable[[], object],
    compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States, expert ids and weights were complete when the previous kernel let this kernel start."""
    ptx = overlapped_ptx(module, kernel, launch, compile_for_hopper, monkeypatch)
    before, _, after = ptx.partition("griddepcontrol.wait")
    assert re.search(r"\bld\.global", before) and re.search(r"\bst\.global", after)
    assert not re.search(r"\b(?:st|atom|red)\.|cp\.async", before)


def test_convolution_ends_after_the_scan_preparation_it_overlaps(
    compile_for_hopper: Callable[[ModuleType, str], CompiledInsteadOfLaunched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convolution and preparation share no memory. The scan reads both results, but waits only for the convolution."""
    ptx = overlapped_ptx(
        conv,
        "_causal_conv_kernel",
        lambda: conv.causal_conv(half(4, 64), half(64, 4), half(64), half(1, 3, 64), PROMPT, after_cut=True),
        compile_for_hopper,
        monkeypatch,
    )
    assert "griddepcontrol.launch_dependents" in ptx.partition("ld.global")[0]
    exits = len(re.findall(r"\bret;", ptx))
    waiting_exits = re.findall(r"griddepcontrol\.wait\b(?:(?!\b(?:ld|st)\.global).)*?\bret;", ptx, re.DOTALL)
    assert exits == len(waiting_exits) == ptx.count("griddepcontrol.wait") > 0
