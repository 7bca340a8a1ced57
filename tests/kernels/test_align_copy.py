"""The align copy, kernel and reference, matches the host's plan bit for bit.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED, launches_kernel
from megatron_mamba_cache.recurrences import align_copy as align_copy_module
from megatron_mamba_cache.recurrences.align_copy import ROWS_AT_A_TIME
from megatron_mamba_cache.recurrences.batches import PAD_SLOT, AlignBatch
from megatron_mamba_cache.recurrences.moves import StateMove
from megatron_mamba_cache.recurrences.slot_tiles import CopyTiling
from tests.kernels.align_steps import Pools, StepRequest, device_batch, padding_request, within_pools
from tests.kernels.kernel_stand_ins import CountedKernel
from tests.kernels.packed_batches import same_bits
from tests.kernels.split_windows import align_with_rings
from tests.recurrences.toy import toy_groups, toy_tensors

BLOCK = 16
WINDOW_LEN = 3
NUM_LAYERS = 2
Op = Callable[[Tensor, Tensor, AlignBatch, int, int], None]
align_copy = within_pools(align_copy_module.align_copy)
align_copy_ref = within_pools(align_copy_module.align_copy_ref)
OPS = {"kernel": align_copy, "twin": align_copy_ref}
OPS |= {f"{name}, next to rings": align_with_rings(op) for name, op in OPS.items()}
both_ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


@pytest.fixture(autouse=True, scope="module")
def counted_kernel() -> Iterator[CountedKernel]:
    with pytest.MonkeyPatch.context() as patch:
        counted = CountedKernel(align_copy_module._align_copy_kernel)
        patch.setattr(align_copy_module, "_align_copy_kernel", counted)
        yield counted


def make_pools(
    device: str,
    num_slots: int,
    window: int = WINDOW_LEN + 4,
    conv_dim: int = 10,
    ssm_shape: tuple[int, int, int] = (2, 3, 4),
    conv_dtype: torch.dtype = torch.bfloat16,
    ssm_dtype: torch.dtype = torch.float32,
) -> Pools:
    conv = torch.randn(NUM_LAYERS, num_slots, window, conv_dim, device=device).to(conv_dtype)
    return Pools(conv, torch.randn(NUM_LAYERS, num_slots, *ssm_shape, device=device).to(ssm_dtype))


def check_op(
    op: Op, pools: Pools, rows: list[StepRequest], block_size: int = BLOCK, window_len: int = WINDOW_LEN
) -> None:
    """Run the op on the pools, and compare the result bitwise with the copies that the host planned."""
    expected = pools.planned(rows, block_size, window_len)
    device = pools.conv.device.type
    kernel = align_copy_module._align_copy_kernel
    launches = kernel.launches
    op(pools.conv, pools.ssm, device_batch(rows, device), block_size, window_len)
    kernel_runs = device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    assert kernel.launches - launches == (
        op in (OPS["kernel"], OPS["kernel, next to rings"]) and kernel_runs and len(rows) > 0
    )
    assert same_bits(pools.conv, expected.conv)
    assert same_bits(pools.ssm, expected.ssm)


KNOWN_STEPS = [  # computed, scheduled, drafts, accepted, state column -> destination column, shift
    ((60, 5, 2, 3, 3), (3, 1)),
    ((30, 3, 0, 2, 1), None),
    ((45, 8, 3, 4, 2), None),
    ((10, 6, 0, 2, 0), (0, 0)),
    ((30, 2, 0, 1, 1), (1, 0)),
    ((60, 3, 0, 3, 2), (3, 1)),
]


@both_ops
@pytest.mark.parametrize(("step", "copy"), KNOWN_STEPS)
def test_align_copy_moves_the_expected_states_in_worked_examples(
    step: tuple[int, int, int, int, int], copy: tuple[int, int] | None, op: Op, device: str
) -> None:
    columns = (6, 2, 5, 1, 4)
    destination, shift = copy or (0, 0)
    computed, scheduled, drafts, accepted, state_column = step
    row = StepRequest(computed, scheduled, drafts, accepted, columns, columns[destination], state_column)
    pools = make_pools(device, num_slots=7)
    before = pools.clone()
    check_op(op, pools, [row])
    if copy is None:
        assert same_bits(pools.conv, before.conv) and same_bits(pools.ssm, before.ssm)
        return
    source = columns[state_column]
    assert same_bits(pools.ssm[:, row.target], before.ssm[:, columns[state_column + shift]])
    assert same_bits(pools.conv[:, row.target, :WINDOW_LEN], before.conv[:, source, shift : shift + WINDOW_LEN])


INTERPRETED_BLOCK_SIZES = (2, 3, 4, 7, 8, 16, 17, 32)  # by default: the interpreter takes seconds for each
BLOCK_SIZES = [
    pytest.param(size, marks=[pytest.mark.slow] if INTERPRETED and size not in INTERPRETED_BLOCK_SIZES else [])
    for size in range(2, 33)
]


@both_ops
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_align_copy_equals_the_host_plan_at_every_position_in_a_block(block_size: int, op: Op, device: str) -> None:
    window = tuple(range(9))  # all rows share their sources
    rows = [
        StepRequest(computed, 9, 8, accepted, window, target=9 + computed * 10 + accepted)
        for computed in range(block_size)
        for accepted in range(10)
    ]
    # Every source slot and time has a unique value that no target has, so the result shows what was copied.
    slots = torch.arange(9 + len(rows), dtype=torch.float32, device=device)
    conv = slots[None, :, None, None] * 100 + torch.arange(10.0, device=device)[None, None, :, None]
    ssm = slots[None, :, None, None, None].clone()
    op(conv, ssm, device_batch(rows, device), block_size, 2)
    for row, first, second, state in zip(
        rows, conv[0, 9:, 0, 0].tolist(), conv[0, 9:, 1, 0].tolist(), ssm[0, 9:, 0, 0, 0].tolist(), strict=True
    ):
        plan = row.plan(block_size)
        if plan is None:
            assert (first, second, state) == (row.target * 100, row.target * 100 + 1, row.target)
        else:
            assert (first, second, state) == (plan.shift, plan.shift + 1, plan.source_column)
    assert any(row.plan(block_size) for row in rows)


def draw_rows(data: st.DataObject, num_columns: int, num_slots: int) -> list[StepRequest]:
    """Return requests with distinct windows and targets; some are padding or have no target."""
    slots = data.draw(st.permutations(range(num_slots)))
    rows = []
    for number in range(num_slots // (num_columns + 1)):
        window, target = slots[number * (num_columns + 1) :][:num_columns], slots[(number + 1) * (num_columns + 1) - 1]
        kind = data.draw(st.sampled_from(["engine", "engine", "in place", "padded", "no target"]))
        target = {"in place": data.draw(st.sampled_from(window)), "no target": PAD_SLOT}.get(kind, target)
        if kind == "padded":
            rows.append(padding_request(num_columns, data.draw(st.sampled_from([PAD_SLOT, target]))))
            continue
        drafts = data.draw(st.integers(0, num_columns - 1))
        accepted = data.draw(st.integers(0, drafts + 1))
        base = data.draw(st.integers(1, 4))
        column = data.draw(st.integers(0, num_columns - 1 - drafts))
        rows.append(
            StepRequest(data.draw(st.integers(0, 40)), base + drafts, drafts, accepted, tuple(window), target, column)
        )
    return rows


@both_ops
@settings(max_examples=15)
@given(data=st.data())
def test_align_copy_equals_the_host_plan_for_random_requests(op: Op, data: st.DataObject) -> None:
    num_columns = data.draw(st.integers(1, 5))
    rows = draw_rows(data, num_columns, num_slots=30)
    check_op(op, make_pools("cpu", 30), rows, block_size=data.draw(st.integers(1, 9)))


def crossing_rows(num_rows: int, shift: int, num_slots_before: int = 0) -> list[StepRequest]:
    """Return requests that are `shift` drafts before a boundary, each with a window of 5 columns and a target."""
    windows = [range(num_slots_before + row * 6, num_slots_before + row * 6 + 6) for row in range(num_rows)]
    return [StepRequest(31 - shift, 5, 4, 5, tuple(slots[:5]), slots[5]) for slots in windows]


@both_ops
@pytest.mark.parametrize("num_rows", [ROWS_AT_A_TIME, ROWS_AT_A_TIME + 1, 2 * ROWS_AT_A_TIME + 44])
def test_align_copy_works_for_any_batch_size(num_rows: int, op: Op, device: str) -> None:
    """Only the first and the last request of each batch reach a boundary."""
    rows = crossing_rows(num_rows, shift=2)
    rows = [
        row if number % 50 == 0 or number == num_rows - 1 else StepRequest(0, 1, 0, 1, row.columns, row.target)
        for number, row in enumerate(rows)
    ]
    check_op(op, make_pools(device, 6 * num_rows, conv_dim=2, ssm_shape=(1, 1, 2)), rows)


@both_ops
def test_align_copy_accepts_an_empty_batch(op: Op, device: str) -> None:
    check_op(op, make_pools(device, 3), [])


@both_ops
def test_align_copy_skips_padding_and_requests_without_a_target(op: Op, device: str) -> None:
    pools = make_pools(device, 13)
    before = pools.clone()
    boundary = crossing_rows(1, 1)[0]
    no_target = StepRequest(boundary.computed, 5, 4, 5, boundary.columns, PAD_SLOT)
    check_op(op, pools, [padding_request(5), no_target, padding_request(5, target=7)], block_size=4)
    assert same_bits(pools.conv, before.conv) and same_bits(pools.ssm, before.ssm)


@both_ops
@pytest.mark.parametrize("shift", range(5))
@pytest.mark.parametrize("target_column", range(5))
def test_align_copy_target_may_be_one_of_the_requests_own_slots(
    target_column: int, shift: int, op: Op, device: str
) -> None:
    """With target column 0, conv windows overlap; with column `shift`, the state's source is its target."""
    request = crossing_rows(1, shift)[0]
    request = StepRequest(request.computed, 5, 4, 5, request.columns, request.columns[target_column])
    check_op(op, make_pools(device, 6, window=12, conv_dim=1100), [request], window_len=7)


@both_ops
@pytest.mark.parametrize("conv_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ssm_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("conv_dim", "ssm_shape"),
    [(63, (5, 5, 20)), (500, (7, 9, 1)), (64, (2, 16, 64)), (1, (1, 1, 1)), (2052, (3, 37, 41))],
)
def test_align_copy_handles_odd_sizes(
    conv_dim: int,
    ssm_shape: tuple[int, int, int],
    ssm_dtype: torch.dtype,
    conv_dtype: torch.dtype,
    op: Op,
    device: str,
) -> None:
    pools = make_pools(device, 12, WINDOW_LEN + 4, conv_dim, ssm_shape, conv_dtype, ssm_dtype)
    check_op(op, pools, [*crossing_rows(2, shift=3), padding_request(5)])


@both_ops
@pytest.mark.parametrize("gap", [1, 8])
def test_align_copy_does_not_change_bytes_between_strided_states(gap: int, op: Op, device: str) -> None:
    conv_buffer = torch.randn(NUM_LAYERS, 12, 8, 40 + gap, device=device).bfloat16()
    ssm_buffer = torch.randn(NUM_LAYERS, 12, 24 + gap, device=device)
    conv, ssm = conv_buffer[:, :, :7, gap:], ssm_buffer[:, :, gap:].unflatten(2, (2, 3, 4))
    assert conv.data_ptr() != conv_buffer.data_ptr() and ssm.data_ptr() != ssm_buffer.data_ptr()
    gaps = Pools(conv_buffer[..., :gap].clone(), ssm_buffer[..., :gap].clone())
    last_time = conv_buffer[:, :, 7].clone()
    check_op(op, Pools(conv, ssm), crossing_rows(2, shift=4))
    assert same_bits(conv_buffer[..., :gap], gaps.conv) and same_bits(ssm_buffer[..., :gap], gaps.ssm)
    assert same_bits(conv_buffer[:, :, 7], last_time)


@pytest.mark.parametrize("op", [align_copy_module.align_copy, align_copy_module.align_copy_ref])
@pytest.mark.parametrize("shift", [0, 3])
def test_align_copy_moves_tensors_of_several_groups_in_one_launch(
    shift: int, op: Callable[..., None], device: str
) -> None:
    pools, rows = toy_tensors(12, 4, device), crossing_rows(2, shift)
    expected = [pool.clone() for pool in pools]
    tensors = [tensor for group in toy_groups() for tensor in group.tensors]
    moves = []
    for tensor, pool, moved in zip(tensors, pools, expected, strict=True):
        window_len = tensor.shape[0] if tensor.motion == "window" else 0
        moves.append(StateMove(pool, pool, window_len))
        for row in rows:
            if window_len:
                moved[:, row.target, :window_len] = pool[:, row.columns[0], shift : shift + window_len]
            else:
                moved[:, row.target] = pool[:, row.columns[shift]]
    launches = align_copy_module._align_copy_kernel.launches
    op(moves, device_batch(rows, device), BLOCK)
    is_kernel = op is align_copy_module.align_copy and launches_kernel(pools[0])
    assert align_copy_module._align_copy_kernel.launches - launches == is_kernel
    assert all(same_bits(pool, moved) for pool, moved in zip(pools, expected, strict=True))


def test_reference_reads_only_the_copied_slots() -> None:
    state = torch.arange(1.0, 5.0)
    whole = state.as_strided((2, 2**40, 4), (0, 0, 1))  # a copy of it would need 32 TiB
    windows = state.as_strided((2, 2**40, WINDOW_LEN + 4, 4), (0, 0, 0, 1))
    moves = [
        StateMove(whole, torch.zeros(2, 6, 4)),
        StateMove(windows, torch.zeros(2, 6, WINDOW_LEN, 4), WINDOW_LEN),
    ]
    rows = crossing_rows(1, shift=2)
    align_copy_module.align_copy_ref(moves, device_batch(rows, "cpu"), BLOCK)
    for move in moves:
        assert isinstance(move.target, Tensor)
        is_target = torch.arange(6) == rows[0].target
        assert (move.target[:, is_target] == state).all() and not move.target[:, ~is_target].any()


@both_ops
def test_align_copy_preserves_the_bits_of_nan(op: Op, device: str) -> None:
    pools = make_pools(device, 6)
    pools.ssm.view(torch.int32)[:, 2, 0, 0, :2] = torch.tensor([0x7F800001, -1], device=device, dtype=torch.int32)
    check_op(op, pools, crossing_rows(1, shift=2))


@both_ops
@pytest.mark.parametrize("accepted_dtype", [torch.int32, torch.int64])
def test_align_copy_accepts_int32_and_int64_counts(accepted_dtype: torch.dtype, op: Op, device: str) -> None:
    rows = crossing_rows(2, shift=3)
    pools = make_pools(device, 12)
    expected = pools.planned(rows, BLOCK, WINDOW_LEN)
    op(pools.conv, pools.ssm, device_batch(rows, device, accepted_dtype), BLOCK, WINDOW_LEN)
    assert same_bits(pools.conv, expected.conv) and same_bits(pools.ssm, expected.ssm)


@pytest.mark.parametrize("tiling", [CopyTiling(4, 1, 1), CopyTiling(16, 2, 3), CopyTiling(4096, 8, 2)])
def test_align_copy_result_does_not_depend_on_the_tiling(tiling: CopyTiling, device: str) -> None:
    rows = crossing_rows(3, shift=2)
    pools = make_pools(device, 18, conv_dim=12, ssm_shape=(2, 5, 8))
    expected = pools.planned(rows, BLOCK, 1)
    align_copy(pools.conv, pools.ssm, device_batch(rows, device), BLOCK, 1, tiling)
    assert same_bits(pools.conv, expected.conv) and same_bits(pools.ssm, expected.ssm)


def bad_calls() -> dict[str, tuple[Callable[[Pools, AlignBatch], tuple[object, ...]], str]]:
    """Return invalid calls, each with an excerpt of the error message."""

    def with_rows(**changes: Tensor) -> Callable[[Pools, AlignBatch], tuple[object, ...]]:
        def arguments(pools: Pools, rows: AlignBatch) -> tuple[object, ...]:
            fields = {name: getattr(rows, name) for name in AlignBatch.__dataclass_fields__}
            return pools.conv, pools.ssm, AlignBatch(**fields | changes), BLOCK, WINDOW_LEN

        return arguments

    return {
        "slots": (lambda p, r: (p.conv[:, 1:], p.ssm, r, BLOCK, WINDOW_LEN), "5 slots, .*on cpu"),
        "dimensions": (lambda p, r: (p.conv[0], p.ssm, r, BLOCK, WINDOW_LEN), "7 slots, .*on cpu, found"),
        "devices": (lambda p, r: (p.conv, p.ssm.to("meta"), r, BLOCK, WINDOW_LEN), "slots, .*on cpu, found .* on meta"),
        "channel-major": (
            lambda p, r: (p.conv.mT.contiguous().mT, p.ssm, r, BLOCK, WINDOW_LEN),
            "inputs of source must be contiguous",
        ),
        "window": (lambda p, r: (p.conv, p.ssm, r, BLOCK, 8), "windows must have at least 8 inputs"),
        "block": (lambda p, r: (p.conv, p.ssm, r, 0, WINDOW_LEN), "block_size"),
        "dtype": (with_rows(drafts=torch.zeros(1, dtype=torch.int64)), "drafts"),
        "accepted dtype": (with_rows(accepted=torch.zeros(1)), "accepted"),
        "length": (with_rows(computed=torch.zeros(2, dtype=torch.int32)), "computed"),
        "columns": (with_rows(columns=torch.zeros(1, dtype=torch.int32)), "columns"),
        "strided": (with_rows(columns=torch.zeros(1, 6, dtype=torch.int32)[:, ::2]), "columns must be contiguous"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_align_copy_refuses_mismatched_arguments(name: str) -> None:
    arguments, reason = bad_calls()[name]
    pools = make_pools("cpu", 6)
    with pytest.raises(ValueError, match=reason):
        align_copy(*arguments(pools, device_batch(crossing_rows(1, 0), "cpu")))


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("num_rows", [5, ROWS_AT_A_TIME + 20])
def test_align_copy_in_a_replayed_graph_reads_new_inputs(num_rows: int) -> None:
    pools = make_pools("cuda", 6 * num_rows, conv_dim=320, ssm_shape=(4, 16, 32))
    steps = [crossing_rows(num_rows, shift) for shift in range(5)]
    steps.append([StepRequest(3, 1, 0, 1, row.columns, row.target) for row in steps[0]])
    steps.append([*crossing_rows(num_rows - 1, 2), padding_request(5)])
    buffers = device_batch(steps[0], "cuda")
    align_copy(pools.conv, pools.ssm, buffers, BLOCK, WINDOW_LEN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        align_copy(pools.conv, pools.ssm, buffers, BLOCK, WINDOW_LEN)
    for rows in steps:
        pools.conv.normal_()
        pools.ssm.normal_()
        expected = pools.planned(rows, BLOCK, WINDOW_LEN)
        fresh = device_batch(rows, "cuda")
        for name in AlignBatch.__dataclass_fields__:
            getattr(buffers, name).copy_(getattr(fresh, name))
        graph.replay()
        assert same_bits(pools.conv, expected.conv) and same_bits(pools.ssm, expected.ssm)


@pytest.mark.gpu
@needs_cuda
def test_align_copy_never_syncs_with_the_device() -> None:
    pools, rows = make_pools("cuda", 12), device_batch(crossing_rows(2, 1), "cuda")
    align_copy(pools.conv, pools.ssm, rows, BLOCK, WINDOW_LEN)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        align_copy(pools.conv, pools.ssm, rows, BLOCK, WINDOW_LEN)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    ("slot_stride", "dtype"),
    [
        (2**31 + 1, torch.bfloat16),  # 2-byte elements, element offsets past 2**31
        (2**30 + 4, torch.float32),  # 16-byte accesses, byte offsets past 2**32
        (2**32 + 4, torch.float32),  # 16-byte accesses, 8-byte elements past 2**31
    ],
)
def test_align_copy_handles_offsets_beyond_32_bits(slot_stride: int, dtype: torch.dtype) -> None:
    num_slots, num_bytes = 6, 5 * slot_stride * dtype.itemsize + 2**16
    if num_bytes > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"needs {num_bytes / 2**30:.0f} GiB of free device memory")
    buffer = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device="cuda")
    ssm = buffer.as_strided((NUM_LAYERS, num_slots, 2, 4, 8), (64, slot_stride, 32, 8, 1))
    conv = buffer[1024:].as_strided((NUM_LAYERS, num_slots, 7, 24), (7 * 24, slot_stride, 24, 1))
    pools = Pools(conv.normal_(), ssm.normal_())
    far = StepRequest(28, 5, 4, 5, (1, 2, 3, 5, 0), 4)
    check_op(align_copy, pools, [far], window_len=WINDOW_LEN)
    check_op(align_copy, pools, [StepRequest(28, 5, 4, 5, (5, 4, 3, 2, 0), 1)], window_len=WINDOW_LEN)
    del pools, conv, ssm, buffer
    torch.cuda.empty_cache()
