"""Records which compiled variant each kernel launch needs, without a GPU: nothing is compiled or computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from triton.runtime import driver

from megatron_mamba_cache.kernels import one_token
from megatron_mamba_cache.kernels.attention import attention_inputs, kv_append, output_gate
from megatron_mamba_cache.kernels.experts import (
    expert_order,
    gemm_tiles,
    grouped_gemm,
    grouped_gemm_hopper,
    pair_gemms,
    prompt_experts,
    quantized_experts,
    quantized_pairs,
    quantized_sums,
    routed_experts,
    router_logits,
    routing,
    summed_gemms,
    weighted_sum,
)
from megatron_mamba_cache.kernels.norm import gated_norm, norm_and_gate
from megatron_mamba_cache.kernels.quantized import (
    activations,
    dequantize,
    few_token_gemm,
    one_token_gemm,
    product,
    prompt_gemm,
)
from megatron_mamba_cache.recurrences import align_copy
from megatron_mamba_cache.recurrences.conv import conv
from megatron_mamba_cache.recurrences.conv import verify as conv_verify
from megatron_mamba_cache.recurrences.gated_delta import scan as delta_scan
from megatron_mamba_cache.recurrences.gated_delta import scan_portable as delta_scan_portable
from megatron_mamba_cache.recurrences.gated_delta import tile_systems
from megatron_mamba_cache.recurrences.gated_delta import verify as delta_verify
from megatron_mamba_cache.recurrences.gated_delta.replay import factors
from megatron_mamba_cache.recurrences.gated_delta.replay import outputs as delta_outputs
from megatron_mamba_cache.recurrences.gated_delta.replay import outputs_sums as delta_outputs_sums
from megatron_mamba_cache.recurrences.gated_delta.replay import tiling as delta_tiling
from megatron_mamba_cache.recurrences.mamba2 import scan, scan_hopper, scan_portable, tiles, verify
from megatron_mamba_cache.recurrences.mamba2.replay import coefficients, outputs, outputs_mma, outputs_sums, tiling
from megatron_mamba_cache.recurrences.replay import boundary_folds, fold_mma
from megatron_mamba_cache.recurrences.replay import tiling as fold_tiling
from megatron_mamba_cache.step.warmup import rehearse
from tests.kernels.kernel_stand_ins import AbsentHopper
from tests.mcore.engine_runs import EngineRun

NUM_MULTIPROCESSORS = 132
KERNELS = (
    (activations, "_quantize_kernel"),
    (align_copy, "_align_copy_kernel"),
    (boundary_folds, "_fold_boundaries_kernel"),
    (boundary_folds, "_plan_kernel"),
    (fold_mma, "_fold_boundaries_kernel"),
    (conv, "_causal_conv_kernel"),
    (conv_verify, "_conv_verify_kernel"),
    (delta_scan_portable, "_scan_kernel"),
    (delta_outputs, "_delta_replay_kernel"),
    (delta_outputs_sums, "_delta_sums_kernel"),
    (delta_verify, "_delta_verify_kernel"),
    (dequantize, "_dequantize_kernel"),
    (expert_order, "_order_kernel"),
    (expert_order, "_count_kernel"),
    (expert_order, "_sum_counts_kernel"),
    (expert_order, "_scatter_kernel"),
    (factors, "_factors_kernel"),
    (few_token_gemm, "_few_tokens_kernel"),
    (gated_norm, "_gated_group_norm_kernel"),
    (grouped_gemm, "_grouped_gemm_kernel"),
    (grouped_gemm_hopper, "_gemm_kernel"),
    (attention_inputs, "_inputs_kernel"),
    (kv_append, "_append_kv_kernel"),
    (norm_and_gate, "_norm_and_gate_kernel"),
    (one_token, "_one_token_kernel"),
    (one_token_gemm, "_one_quantized_token_kernel"),
    (output_gate, "_gate_kernel"),
    (pair_gemms, "_pairs_kernel"),
    (prompt_experts, "_prompt_experts_kernel"),
    (prompt_gemm, "_prompt_gemm_kernel"),
    (quantized_experts, "_quantized_experts_kernel"),
    (quantized_pairs, "_quantized_pairs_kernel"),
    (quantized_sums, "_quantized_sum_kernel"),
    (summed_gemms, "_sum_kernel"),
    (gemm_tiles, "_tiles_kernel"),
    (coefficients, "_coefficients_kernel"),
    (router_logits, "_logits_kernel"),
    (routing, "_route_kernel"),
    (scan_hopper, "_scan_kernel"),
    (scan_portable, "_scan_kernel"),
    (tile_systems, "_systems_kernel"),
    (tiles, "_tiles_kernel"),
    (outputs, "_state_replay_kernel"),
    (outputs_mma, "_state_mma_kernel"),
    (outputs_sums, "_state_sums_kernel"),
    (verify, "_state_verify_kernel"),
    (weighted_sum, "_weighted_sum_kernel"),
)


class LaunchRecord:
    """The variants requested per kernel since the last `take`."""

    def __init__(self) -> None:
        self._forms: set[tuple[str, str]] = set()

    def add(self, kernel: str, form: str) -> None:
        """Record a launch."""
        self._forms.add((kernel, form))

    def take(self) -> set[tuple[str, str]]:
        """Return the variants, and forget them."""
        forms, self._forms = self._forms, set()
        return forms


class RecordedKernel:
    """Stand in for a kernel: record the variant of a launch, and zero the outputs, which are not computed."""

    def __init__(self, kernel: object, name: str, record: LaunchRecord) -> None:
        self._kernel = kernel
        self._name = name
        self._record = record

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def note(**arguments: object) -> None:
            *_, binder = self._kernel.device_caches[0]
            _, specialization, options = binder(**arguments)
            self._record.add(self._name, f"{specialization} {options}")
            outputs = arguments.get("out", arguments.get("y"))
            if isinstance(outputs, torch.Tensor):
                outputs.zero_()

        return note


@contextmanager
def recorded_launches(*, on_hopper: bool) -> Iterator[LaunchRecord]:
    """Let engines on the CPU launch stand-ins of the kernels, those of an H200 or the portable ones."""
    record = LaunchRecord()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", AbsentHopper())
        for module, name in KERNELS:
            kernel = RecordedKernel(getattr(module, name), f"{module.__name__}.{name}", record)
            patch.setattr(module, name, kernel)
            patch.setattr(module, "launches_kernel", lambda tensor: True, raising=False)
        patch.setattr(scan, "launches_kernel", lambda tensor: True)
        patch.setattr(delta_scan, "launches_kernel", lambda tensor: True)
        patch.setattr(scan, "_fits_hopper", lambda *_: on_hopper)
        patch.setattr(fold_mma, "num_multiprocessors", lambda device: NUM_MULTIPROCESSORS)
        for module in (tiling, delta_tiling, fold_tiling):
            patch.setattr(module, "runs_gluon", lambda tensor: on_hopper)
        for module in (routed_experts, product):
            patch.setattr(module, "launches_kernel", lambda tensor: True)
        patch.setattr(one_token_gemm, "INTERPRETED", True)  # so that no GPU is asked whether it converts FP8
        patch.setattr(grouped_gemm_hopper, "num_multiprocessors", lambda device: NUM_MULTIPROCESSORS)
        patch.setattr(gemm_tiles, "can_load_boxes", lambda weight: on_hopper)
        patch.setattr(scan, "num_multiprocessors", lambda device: NUM_MULTIPROCESSORS)
        yield record


def rehearse_engine(run: EngineRun) -> None:
    rehearse(run.engine.controller.inference_wrapped_model, run.context.runner)
