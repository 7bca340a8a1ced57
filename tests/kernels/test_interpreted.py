"""The kernel tests pass in Triton's interpreter, which needs no GPU.

They run in a separate process, because Triton binds each kernel to the interpreter or compiler when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import triton
from packaging.version import Version

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED

# Groups of tests that take about equally long; each group runs in a process.
GROUPS = [
    [
        "test_causal_conv.py",
        "test_conv_verify.py",
        "test_hidden_states.py",
        "test_align_copy.py",
        "test_gated_norm.py",
        "test_norm_and_gate.py",
        "test_kv_append.py",
        "test_attention_inputs.py",
        "test_output_gate.py",
        "test_split_prompts.py",
        "test_grouped_gemm.py",
        "test_gemm_tiles.py",
    ],
    [
        "test_ssd_scan_kernels.py",
        "test_state_verify.py",
        "test_slot_copies.py",
        "test_quantized_states.py",
        "test_routing.py",
        "test_squared_relu.py",
        "test_gated_silu.py",
        "test_sum_of_ranks.py",
        "test_token_masks.py",
        "test_penalties.py",
    ],
    ["test_prompt_gemm.py", "test_prompt_experts.py"],
    ["test_state_replay.py", "test_boundary_folds.py", "test_boundary_plan.py"],
    [
        "test_few_tokens.py",
        "test_one_token.py",
        "test_one_quantized_token.py",
        "test_residual_norm.py",
        "test_token_draws.py",
    ],
    [
        "test_greedy_draws.py",
        "test_verification.py",
        "test_draft_passes.py",
        "test_followed_steps.py",
        "test_delta_verify.py",
        "test_fp16_states.py",
    ],
    ["test_delta_scan.py"],
    ["test_delta_replay.py"],
    ["test_quantized_gemm.py", "test_quantized_experts.py", "test_quantized_pairs.py", "test_fp8_decode.py"],
]
# Triton 3.6 converts arrays of one element to Python numbers, which numpy 2.4 does not support.
IS_BROKEN = Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.4")


@pytest.mark.long
@pytest.mark.skipif(INTERPRETED, reason="runs in the interpreter already")
@pytest.mark.skipif(IS_BROKEN, reason="this Triton's interpreter does not run with this numpy")
@pytest.mark.parametrize("files", GROUPS, ids=lambda files: files[0])
def test_kernels_pass_their_tests_in_the_interpreter(files: list[str], pytestconfig: pytest.Config) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "--color=no",
            *(["--run-slow"] if pytestconfig.getoption("--run-slow") else []),
            *(str(Path(__file__).parent / file) for file in files),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
