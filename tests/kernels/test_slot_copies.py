"""Slot copies are bitwise exact and change no other slot, for kernel and reference.

Without a GPU or the interpreter, the ops are their references; `test_interpreted` runs this file again.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import launches_kernel
from megatron_mamba_cache.recurrences import slot_copies
from megatron_mamba_cache.recurrences.batches import PAD_SLOT
from megatron_mamba_cache.recurrences.slot_copies import SLOTS_AT_A_TIME, copy_slots, copy_slots_ref
from megatron_mamba_cache.recurrences.slot_tiles import CopyTiling
from tests.kernels.kernel_stand_ins import CountedKernel
from tests.kernels.packed_batches import same_bits
from tests.recurrences.toy import toy_tensors

NUM_SLOTS = 12
Op = Callable[..., None]
both_copies = pytest.mark.parametrize("op", [copy_slots, copy_slots_ref])
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True, scope="module")
def counted_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_copies, "_copy_slots_kernel", CountedKernel(slot_copies._copy_slots_kernel))
        yield


def make_pools(
    device: str,
    num_slots: int = NUM_SLOTS,
    conv_shape: tuple[int, ...] = (3, 5),
    ssm_shape: tuple[int, ...] = (2, 4, 3),
    conv_dtype: torch.dtype = torch.bfloat16,
    ssm_dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    conv = torch.randn(2, num_slots, *conv_shape, device=device).to(conv_dtype)
    ssm = torch.randn(2, num_slots, *ssm_shape, device=device).to(ssm_dtype)
    ssm[:, 0] = float("nan")
    return [conv, ssm]


def int32(values: Sequence[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def num_launches() -> int:
    return slot_copies._copy_slots_kernel.launches


def run_counted(op: Op, slots: Tensor, *arguments: object) -> None:
    """Run an op, and check that it has one launch if its kernel can run and has work, else none."""
    before = num_launches()
    op(*arguments)
    is_kernel = op is copy_slots and launches_kernel(slots)
    assert num_launches() - before == (is_kernel and len(slots) > 0)


def check_copy(op: Op, pools: Sequence[Tensor], src: Sequence[int], dst: Sequence[int]) -> None:
    expected = [pool.clone() for pool in pools]
    for pool, copied in zip(pools, expected, strict=True):
        for s, d in zip(src, dst, strict=True):
            if PAD_SLOT not in (s, d):
                copied[:, d] = pool[:, s]
    device = pools[0].device.type
    targets = int32(dst, device)
    run_counted(op, targets, pools, pools, int32(src, device), targets)
    assert all(same_bits(pool, copied) for pool, copied in zip(pools, expected, strict=True))


def draw_pairs(data: st.DataObject) -> tuple[list[int], list[int]]:
    """Return pairs of slots in any order, where no target is a source; sources or targets may be padding."""
    slots = data.draw(st.permutations(range(NUM_SLOTS)))
    num_targets = data.draw(st.integers(0, NUM_SLOTS - 1))
    dst = data.draw(st.permutations(slots[:num_targets] + [PAD_SLOT] * data.draw(st.integers(0, 3))))
    sources = st.sampled_from([PAD_SLOT, *slots[num_targets:]])
    return data.draw(st.lists(sources, min_size=len(dst), max_size=len(dst))), dst


@both_copies
@settings(max_examples=25)
@given(data=st.data())
def test_slot_copy_is_exact_and_changes_no_other_slot(op: Op, data: st.DataObject) -> None:
    check_copy(op, make_pools("cpu"), *draw_pairs(data))


@both_copies
def test_slot_copy_copies_tensors_of_any_shape_and_dtype_in_one_launch(op: Op, device: str) -> None:
    check_copy(op, toy_tensors(NUM_SLOTS, 3, device), [1, PAD_SLOT, 3], [0, 2, 5])


@both_copies
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([], []),
        ([PAD_SLOT], [2]),
        ([2], [PAD_SLOT]),
        ([PAD_SLOT, 1], [1, PAD_SLOT]),
        ([0], [0]),
        ([PAD_SLOT, 0, 1, 1, 3], [3, 8, 7, 4, PAD_SLOT]),
    ],
)
def test_slot_copy_skips_pairs_with_padding(src: list[int], dst: list[int], op: Op, device: str) -> None:
    check_copy(op, make_pools(device), src, dst)


AWKWARD_SIZES = pytest.mark.parametrize(
    ("conv_shape", "ssm_shape"),
    [((3, 21), (5, 5, 20)), ((1, 1), (1, 1, 1)), ((4, 500), (7, 9, 1)), ((3, 64), (2, 16, 64)), ((3, 4), (3, 37, 41))],
)
DTYPES = pytest.mark.parametrize(
    ("conv_dtype", "ssm_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)


@both_copies
@AWKWARD_SIZES
@DTYPES
def test_slot_copy_handles_odd_sizes(
    conv_shape: tuple[int, ...],
    ssm_shape: tuple[int, ...],
    conv_dtype: torch.dtype,
    ssm_dtype: torch.dtype,
    op: Op,
    device: str,
) -> None:
    pools = make_pools(device, 6, conv_shape, ssm_shape, conv_dtype, ssm_dtype)
    check_copy(op, pools, [0, 4, PAD_SLOT], [2, 1, 3])


@pytest.mark.parametrize("num_slots", [SLOTS_AT_A_TIME, SLOTS_AT_A_TIME + 1])
def test_slot_copy_works_for_any_number_of_slots(num_slots: int, device: str) -> None:
    """Most pairs are padding; the last one is not."""
    named = [slot if slot % 40 == 0 or slot == num_slots - 1 else PAD_SLOT for slot in range(num_slots)]
    pools = make_pools(device, 2 * num_slots, (1, 2), (1, 1, 2))
    check_copy(copy_slots, pools, named, range(num_slots, 2 * num_slots))


@pytest.mark.parametrize("tiling", [CopyTiling(4, 1, 1), CopyTiling(16, 2, 3), CopyTiling(4096, 8, 2)])
def test_slot_copy_result_does_not_depend_on_the_tiling(tiling: CopyTiling, device: str) -> None:
    pools, slots = make_pools(device, conv_shape=(3, 12), ssm_shape=(2, 5, 8)), int32([1, 4], device)
    expected = [pool.clone() for pool in pools]
    copy_slots(pools, pools, slots, slots + 1, tiling)
    for pool, copied in zip(pools, expected, strict=True):
        copied[:, [2, 5]] = copied[:, [1, 4]]
        assert same_bits(pool, copied)


@pytest.mark.parametrize("gap", [1, 8])
def test_slot_copy_does_not_change_bytes_between_strided_slots(gap: int, device: str) -> None:
    buffers = [torch.randn(2, 6, 24 + gap, device=device), torch.randn(2, 6, 40 + gap, device=device).bfloat16()]
    pools = [buffer[:, :, gap:].unflatten(2, (4, -1)) for buffer in buffers]
    gaps = [buffer[..., :gap].clone() for buffer in buffers]
    check_copy(copy_slots, pools, [1, 2], [5, 4])
    assert all(same_bits(buffer[..., :gap], kept) for buffer, kept in zip(buffers, gaps, strict=True))


@both_copies
@pytest.mark.parametrize("shift", [0, 1])
def test_slot_copy_works_between_pools_of_different_sizes(shift: int, op: Op, device: str) -> None:
    """With a shift, the pools' alignment allows other access widths."""
    memory = torch.randn(2 * 7 * 24 + 1, device=device)
    sources = [memory[shift:][: 2 * 7 * 24].view(2, 7, 24), torch.randn(2, 4, 5, device=device)]
    pools = [torch.randn(2, 3, 24, device=device), torch.randn(2, 9, 5, device=device)]
    before = [pool.clone() for pool in sources]
    expected = [pool.clone() for pool in pools]
    for source, pool in zip(sources, expected, strict=True):
        pool[:, 2], pool[:, 0] = source[:, 1], source[:, 3]
    src, dst = int32([1, PAD_SLOT, 3], device), int32([2, 1, 0], device)
    run_counted(op, src, sources, pools, src, dst)
    assert all(same_bits(pool, copied) for pool, copied in zip(pools, expected, strict=True))
    assert all(same_bits(pool, kept) for pool, kept in zip(sources, before, strict=True))


def test_slot_copy_casts_states_of_another_dtype(device: str) -> None:
    source, pool = torch.randn(2, 4, 5, device=device), torch.zeros(2, 3, 5, dtype=torch.bfloat16, device=device)
    copy_slots([source], [pool], int32([3], device), int32([1], device))
    assert same_bits(pool[:, 1], source[:, 3].bfloat16()) and not pool[:, [0, 2]].any()


def bad_calls() -> dict[str, tuple[Callable[[list[Tensor], Tensor], object], str]]:
    """Return invalid calls, each with an excerpt of the error message."""
    return {
        "lengths": (
            lambda pools, slots: copy_slots(pools, pools, slots, slots[:1]),
            "src and dst must have the same length",
        ),
        "dtype": (lambda pools, slots: copy_slots(pools, pools, slots.long(), slots), "src"),
        "strided numbers": (lambda pools, slots: copy_slots(pools, pools, slots[::2], slots[::2]), "contiguous"),
        "device": (lambda pools, slots: copy_slots(*[[pools[0].to("meta")]] * 2, slots, slots), "one device"),
        "channel-major": (lambda pools, slots: copy_slots(*[[pools[0].mT]] * 2, slots, slots), "with contiguous slots"),
        "shape": (lambda pools, slots: copy_slots(pools[:1], pools[1:], slots, slots), "only in the number of slots"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_slot_copy_refuses_mismatched_arguments(name: str) -> None:
    call, reason = bad_calls()[name]
    with pytest.raises(ValueError, match=reason):
        call(make_pools("cpu"), int32([1, 2, 3], "cpu"))


@pytest.mark.gpu
def test_reference_reads_only_the_copied_slots() -> None:
    state = torch.arange(1.0, 5.0)
    source = state.as_strided((2, 2**40, 4), (0, 0, 1))  # a copy of it would need 32 TiB
    pool = torch.zeros(2, 4, 4)
    copy_slots_ref((source,), (pool,), int32([77, 78], "cpu"), int32([1, 3], "cpu"))
    assert torch.equal(pool, torch.stack([0 * state, state, 0 * state, state]).expand(2, -1, -1))


@needs_cuda
def test_slot_copy_in_a_replayed_graph_reads_new_slots() -> None:
    pools, src, dst = make_pools("cuda"), int32([1, 2, 3], "cuda"), int32([4, PAD_SLOT, 6], "cuda")
    copy_slots(pools, pools, src, dst)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_slots(pools, pools, src, dst)
    for numbers in ([7, 8, PAD_SLOT], [PAD_SLOT] * 3, [9, 10, 11]):
        dst.copy_(int32(numbers, "cuda"))
        expected = [pool.normal_().clone() for pool in pools]
        copy_slots_ref(expected, expected, src, dst)
        graph.replay()
        assert all(same_bits(pool, copied) for pool, copied in zip(pools, expected, strict=True))


@pytest.mark.gpu
@needs_cuda
def test_slot_copy_does_not_recompile_for_other_counts_or_alignments() -> None:
    pools = make_pools("cuda")
    counted = slot_copies._copy_slots_kernel.kernel
    sizes = []
    for count in (1, 2, 3, 15):
        numbers = int32([0, *range(6), *[PAD_SLOT] * 9], "cuda")[1 : count + 1]
        copy_slots(pools, pools, numbers, torch.where(numbers >= 0, numbers + 6, PAD_SLOT))
        sizes.append(sum(len(cache[0]) for cache in counted.device_caches.values()))
    assert all(size == sizes[0] for size in sizes)


@pytest.mark.gpu
@needs_cuda
def test_slot_copy_handles_offsets_beyond_32_bits() -> None:
    slot_stride = 2**31 + 8
    num_bytes = (3 * slot_stride + 2**16) * 2
    if num_bytes > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"needs {num_bytes / 2**30:.0f} GiB of free device memory")
    buffer = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="cuda")
    pool = buffer.as_strided((2, 4, 4, 8), (64, slot_stride, 8, 1)).normal_()
    check_copy(copy_slots, [pool], [3, 0], [1, 2])
    del pool, buffer
    torch.cuda.empty_cache()
