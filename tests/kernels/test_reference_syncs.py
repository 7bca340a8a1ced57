"""Ops and references never synchronize with the device, because they run in asynchronous steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.attention.head_changes import HeadChanges, HeadNorms, Rotation
from megatron_mamba_cache.kernels.attention.interface import AttentionRows
from megatron_mamba_cache.kernels.attention.kv_append import append_kv
from megatron_mamba_cache.kernels.attention.reference import (
    append_kv_ref,
    paged_attention_ref,
    write_attention_inputs_ref,
)
from megatron_mamba_cache.kernels.norm.gated_norm import gated_group_norm
from megatron_mamba_cache.kernels.norm.norm_and_gate import norm_and_gate
from megatron_mamba_cache.kernels.sampling.greedy_draws import greedy_tokens, greedy_tokens_ref
from megatron_mamba_cache.kernels.sampling.row_tiles import SamplingRows
from megatron_mamba_cache.kernels.sampling.sampling import (
    sample_tokens,
    sample_tokens_ref,
    token_probabilities,
)
from megatron_mamba_cache.kernels.sampling.verification import (
    DraftDistributions,
    RatioUniforms,
    VerifyLogits,
    accept_by_ratio,
    accept_matching,
    accept_matching_ref,
)
from megatron_mamba_cache.recurrences.conv.conv import causal_conv
from megatron_mamba_cache.recurrences.conv.reference import causal_conv_ref, conv_verify_ref
from megatron_mamba_cache.recurrences.conv.verify import conv_verify
from megatron_mamba_cache.recurrences.draft_inputs import DraftInputs
from megatron_mamba_cache.recurrences.gated_delta.reference import delta_scan_ref, delta_verify_ref
from megatron_mamba_cache.recurrences.gated_delta.replay.outputs import delta_replay
from megatron_mamba_cache.recurrences.gated_delta.replay.reference import delta_replay_ref
from megatron_mamba_cache.recurrences.gated_delta.scan import delta_scan
from megatron_mamba_cache.recurrences.gated_delta.verify import delta_verify
from megatron_mamba_cache.recurrences.hidden_states import (
    previous_in_decode,
    previous_in_decode_ref,
    previous_in_prompts,
    previous_in_prompts_ref,
)
from megatron_mamba_cache.recurrences.mamba2.reference import ssd_scan_ref, state_verify_ref
from megatron_mamba_cache.recurrences.mamba2.replay.outputs import state_replay
from megatron_mamba_cache.recurrences.mamba2.replay.reference import state_replay_ref
from megatron_mamba_cache.recurrences.mamba2.scan import ssd_scan
from megatron_mamba_cache.recurrences.mamba2.verify import state_verify
from megatron_mamba_cache.recurrences.moves import align_copy_ref
from megatron_mamba_cache.recurrences.replay.boundary_folds import fold_boundaries
from megatron_mamba_cache.recurrences.replay.reference import fold_boundaries_ref
from megatron_mamba_cache.recurrences.slot_copies import copy_slots, copy_slots_ref
from tests.kernels import delta_steps
from tests.kernels.align_steps import StepRequest, device_batch, padding_request, within_pools
from tests.kernels.packed_batches import RowSpec, VerifySpec, pack_rows, pack_verify
from tests.kernels.replay_steps import ReplayedRequests, Turn, layered
from tests.kernels.ssm_steps import SSMShape, random_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@contextmanager
def forbidden_syncs() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def conv_call(op: Callable[..., Tensor] = causal_conv_ref) -> Callable[[], object]:
    rows = pack_rows([RowSpec(11, final=0, boundaries={8: 1}), RowSpec(0), RowSpec(3, initial=2)], 8, "cuda", 1)
    x, weight, bias, pool = randn(16, 20), randn(20, 4), randn(20), randn(4, 3, 20)
    return lambda: op(x, weight, bias, pool, rows)


ODD_SHAPE = SSMShape()


def scan_call(scan: Callable[..., Tensor], shape: SSMShape = ODD_SHAPE) -> Callable[[], object]:
    rows = pack_rows([RowSpec(11, final=0, boundaries={8: 1}), RowSpec(0), RowSpec(3, initial=2)], 8, "cuda", 1)
    steps, pool = random_steps(16, "cuda", shape), randn(4, *shape.state)
    return lambda: scan(steps.tokens, steps.weights, pool, rows, 8)


def hopper_scan_call() -> Callable[[], object]:
    shape = SSMShape(heads=8, head_dim=64, d_state=128, groups=2)
    rows = pack_rows([RowSpec(200, final=0, boundaries={128: 1}), RowSpec(3, initial=2)], 128, "cuda", 1)
    steps, pool = random_steps(210, "cuda", shape).cast(torch.bfloat16), randn(4, *shape.state)
    return lambda: ssd_scan(steps.tokens, steps.weights, pool, rows, 128)


def delta_scan_call(scan: Callable[..., Tensor]) -> Callable[[], object]:
    rows = pack_rows([RowSpec(11, final=0, boundaries={8: 1}), RowSpec(0), RowSpec(3, initial=2)], 8, "cuda", 1)
    steps = delta_steps.random_steps(16, "cuda")
    pool = randn(4, *delta_steps.DeltaShape().state)
    arguments = () if scan is delta_scan_ref else (8,)
    return lambda: scan(steps.tokens, steps.gates, pool, rows, *arguments)


VERIFY_ROWS = [VerifySpec(3, (3, 4, 5), accepted=2), VerifySpec(1), VerifySpec(1, (0,)), VerifySpec(0)]


def conv_verify_call(op: Callable[..., Tensor] = conv_verify_ref) -> Callable[[], object]:
    x, weight, bias, pool = randn(7, 20), randn(20, 4), randn(20), randn(6, 5, 20)
    rows, drafts = pack_verify(VERIFY_ROWS, "cuda"), DraftInputs(randn(5, 2, 20), int32(1, 0, 4, 0))
    return lambda: (op(x, weight, bias, pool, rows), op(x, weight, bias, pool, rows, drafts=drafts))


def prompt_states_call(op: Callable[..., Tensor]) -> Callable[[], object]:
    rows = pack_rows([RowSpec(11, final=0, boundaries={8: 1}), RowSpec(0), RowSpec(3, initial=2)], 8, "cuda", 1)
    x, pool = randn(16, 20), randn(4, 3, 20)
    return lambda: op(x, pool, rows, pool)


def decode_states_call(op: Callable[..., Tensor]) -> Callable[[], object]:
    x, pool, rows = randn(7, 20), randn(6, 5, 20), pack_verify(VERIFY_ROWS, "cuda")
    return lambda: op(x, pool, rows)


def state_verify_call(op: Callable[..., Tensor] = state_verify_ref) -> Callable[[], object]:
    steps, pool, rows = random_steps(7, "cuda"), randn(6, 4, 7, 5), pack_verify(VERIFY_ROWS, "cuda")
    return lambda: op(steps.tokens, steps.weights, pool, rows)


def delta_verify_call(op: Callable[..., Tensor]) -> Callable[[], object]:
    steps, rows = delta_steps.random_steps(7, "cuda"), pack_verify(VERIFY_ROWS, "cuda")
    pool = randn(6, *delta_steps.DeltaShape().state)
    return lambda: op(steps.tokens, steps.gates, pool, rows)


def state_replay_call(op: Callable[..., Tensor] = state_replay_ref) -> Callable[[], object]:
    requests = ReplayedRequests([random_steps(9, "cuda")], ODD_SHAPE, 4, 3, starts=[5])
    (request,) = requests.requests
    rows, step = requests.rows([Turn(request, 2), Turn(None)]), request.text[:4]
    return lambda: op(step.tokens, step.weights, requests.pool, requests.ring, rows, 4)


def delta_replay_call(op: Callable[..., Tensor] = delta_replay_ref) -> Callable[[], object]:
    shape = delta_steps.DeltaShape()
    text = delta_steps.random_steps(9, "cuda", shape)
    requests = ReplayedRequests([text], shape.of_ring, 4, 3, starts=[5])
    (request,) = requests.requests
    rows, step = requests.rows([Turn(request, 2), Turn(None)]), text[:4]
    return lambda: op(step.tokens, step.gates, requests.pool, requests.ring, rows, 4)


def fold_boundaries_call(op: Callable[..., None] = fold_boundaries_ref) -> Callable[[], object]:
    requests = ReplayedRequests([random_steps(9, "cuda")], ODD_SHAPE, 4, 3)
    pools, rings = layered(requests.pool, requests.ring)
    rows = requests.folds([0], [5])
    return lambda: op(pools, rings, rows, 4)


def slot_copies_call() -> Callable[[], object]:
    pools, src, dst = [randn(2, 4, 3), randn(2, 4, 5, 6)], int32(0, -1), int32(1, 2)
    return lambda: copy_slots(pools, pools, src, dst)


def token_kernels_call() -> Callable[[], object]:
    new, cache, blocks, offsets = randn(2, 3, 2, 8), randn(2, 9, 4, 2, 8), int32(1, -1, 4), int32(0, 1, 2)
    y, z, weight = randn(3, 24), randn(3, 24), randn(24)
    return lambda: (
        append_kv(new[0], new[1], cache[0], cache[1], blocks, offsets),
        gated_group_norm(y, z, weight, 8, 1e-5),
        norm_and_gate(y, z, weight[:8], 1e-6),
    )


def copy_call() -> Callable[[], object]:
    pools, src, dst = [randn(2, 4, 3), randn(2, 4, 5, 6)], int32(0, -1), int32(1, 2)
    return lambda: copy_slots_ref(pools, pools, src, dst)


def align_call() -> Callable[[], object]:
    rows = device_batch([StepRequest(13, 3, 2, 3, (0, 1, 2), 3), padding_request(3)], "cuda")
    conv_pool, ssm_pool = randn(2, 4, 5, 6), randn(2, 4, 2, 3, 5)
    drafts = DraftInputs(randn(2, 3, 2, 6), int32(1, 0))
    align = within_pools(align_copy_ref)
    return lambda: (align(conv_pool, ssm_pool, rows, 16, 3), align(conv_pool, ssm_pool, rows, 16, 3, drafts=drafts))


def attention_call() -> Callable[[], object]:
    table = int32(*range(9)).view(3, 3)
    rows = AttentionRows(int32(0, 1, 2, 5), int32(3, 6, 9), table, (1, 1, 3), (3, 6, 9), table.cpu().numpy())
    q, k_cache, v_cache = randn(6, 4, 8), randn(9, 4, 2, 8), randn(9, 4, 2, 8)
    return lambda: paged_attention_ref(q, k_cache, v_cache, rows, 0.3)


def append_call() -> Callable[[], object]:
    new, k_cache, v_cache, blocks, offsets = (
        randn(2, 3, 2, 8),
        randn(9, 4, 2, 8),
        randn(9, 4, 2, 8),
        int32(1, -1, 4),
        int32(0, 1, 2),
    )
    return lambda: append_kv_ref(new[0], new[1], k_cache, v_cache, blocks, offsets)


def inputs_call() -> Callable[[], object]:
    new, caches, query = randn(2, 3, 2, 8), randn(2, 9, 4, 2, 8), randn(4, 2, 2, 8)
    slots = int32(1, -1, 4), int32(0, 1, 2)
    changes = HeadChanges(HeadNorms(randn(8), randn(8), 1e-6), Rotation(randn(5, 2, 3), int32(0, 4, 2).long()))
    return lambda: write_attention_inputs_ref(query, new[0], new[1], caches[0], caches[1], *slots, changes)


def sampling_call() -> Callable[[], object]:
    logits, temperature, top_p, uniforms = (
        randn(3, 50),
        randn(3).abs(),
        randn(3).sigmoid(),
        torch.rand(3, device="cuda"),
    )
    top_k = int32(0, 1, 7)
    rows = SamplingRows(logits, temperature, top_k, top_p)
    return lambda: (
        greedy_tokens(logits),
        greedy_tokens_ref(logits),
        sample_tokens(rows, uniforms.double()),
        sample_tokens(rows, uniforms.double(), any_cut=False),
        sample_tokens_ref(rows, uniforms.double()),
    )


def verification_call() -> Callable[[], object]:
    logits, settings = randn(6, 50), (randn(6).abs(), int32(0, 1, 7, 0, 3, 0), randn(6).sigmoid())
    tokens, drafts = (torch.arange(6, device="cuda") for _ in range(2))
    rows = VerifyLogits(int32(0, 3, 4, 6, 6), drafts, 2)
    sampled = DraftDistributions(randn(3, 50).softmax(-1), int32(0, 1, -1, -1, 2, -1))
    uniforms = RatioUniforms(*torch.rand(2, 6, device="cuda", dtype=torch.float64))
    return lambda: (
        accept_matching(tokens, rows),
        accept_matching_ref(tokens, rows),
        accept_by_ratio(tokens, token_probabilities(SamplingRows(logits, *settings)), rows, sampled, uniforms),
    )


CALLS = [
    conv_call,
    partial(conv_call, causal_conv),
    partial(scan_call, ssd_scan_ref),
    partial(scan_call, ssd_scan, SSMShape(4, 16, 32, 2)),
    hopper_scan_call,
    partial(delta_scan_call, delta_scan_ref),
    partial(delta_scan_call, delta_scan),
    partial(delta_verify_call, delta_verify_ref),
    partial(delta_verify_call, delta_verify),
    conv_verify_call,
    partial(conv_verify_call, conv_verify),
    partial(prompt_states_call, previous_in_prompts),
    partial(prompt_states_call, previous_in_prompts_ref),
    partial(decode_states_call, previous_in_decode),
    partial(decode_states_call, previous_in_decode_ref),
    state_verify_call,
    partial(state_verify_call, state_verify),
    state_replay_call,
    partial(state_replay_call, state_replay),
    delta_replay_call,
    partial(delta_replay_call, delta_replay),
    fold_boundaries_call,
    partial(fold_boundaries_call, fold_boundaries),
    slot_copies_call,
    token_kernels_call,
    copy_call,
    align_call,
    attention_call,
    append_call,
    inputs_call,
    sampling_call,
    verification_call,
]


@pytest.mark.parametrize("prepare", CALLS)
def test_kernel_op_never_syncs_with_the_device(prepare: Callable[[], Callable[[], object]]) -> None:
    call = prepare()
    call()
    with forbidden_syncs():
        call()


@pytest.mark.parametrize("prepare", CALLS)
def test_kernel_op_can_be_captured_in_a_cuda_graph(prepare: Callable[[], Callable[[], object]]) -> None:
    call = prepare()
    call()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        call()


def test_sync_check_detects_a_deliberate_sync() -> None:
    tensor = randn(1)
    with forbidden_syncs(), pytest.raises(RuntimeError):
        tensor.item()
