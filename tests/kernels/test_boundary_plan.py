"""The device's plan of boundary folds equals the host's, request by request."""

import pytest
import torch

from megatron_mamba_cache.policy.align import plan_align_copy
from megatron_mamba_cache.recurrences.batches import PAD_SLOT, AlignBatch, ReplayBatch
from megatron_mamba_cache.recurrences.mamba2.replay.boundary_folds import plan_boundary_folds
from megatron_mamba_cache.recurrences.mamba2.replay.reference import plan_boundary_folds_ref
from megatron_mamba_cache.recurrences.mamba2.replay.ring import BoundaryFolds

BLOCK, RING = 16, 8
FIELDS = ("slots", "buffers", "folded", "ends", "targets")


def random_step(num_rows: int, device: str) -> tuple[ReplayBatch, AlignBatch]:
    """Return requests, of which some are padding, some have no target, and some reach a boundary."""
    generator = torch.Generator().manual_seed(num_rows)

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (num_rows,), generator=generator, dtype=torch.int32)

    computed, drafts = draw(1, 5 * BLOCK), draw(0, 9)
    accepted = (torch.rand(num_rows, generator=generator) * (2 + drafts)).long()  # 0 counts as 1
    folded = computed - (torch.rand(num_rows, generator=generator) * computed.clamp_max(RING + 8)).int()
    slots = torch.arange(num_rows, dtype=torch.int32).masked_fill(draw(0, 5) == 0, PAD_SLOT)
    targets = (1000 + torch.arange(num_rows, dtype=torch.int32)).masked_fill(draw(0, 4) == 0, PAD_SLOT)
    columns = slots[:, None].repeat(1, 9)
    align = AlignBatch(computed, 1 + drafts, drafts, accepted, columns, torch.zeros_like(slots), targets)
    cu_tokens = torch.zeros(num_rows + 1, dtype=torch.int32)
    rows = ReplayBatch(cu_tokens, slots, draw(0, 99), folded, computed, 9)

    def moved(value: object) -> object:
        names = value.__dataclass_fields__  # type: ignore[attr-defined]
        found = {name: getattr(value, name) for name in names}
        return type(value)(**{name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in found.items()})

    return moved(rows), moved(align)  # type: ignore[return-value]


def lists(folds: BoundaryFolds) -> list[list[int]]:
    return [getattr(folds, name).tolist() for name in FIELDS]


@pytest.mark.parametrize("num_rows", [0, 1, 5, 256, 300])
def test_boundary_plan_on_the_device_equals_the_host_plan(num_rows: int, device: str) -> None:
    rows, align = random_step(num_rows, device)
    slots, rings, folded, ends, targets = lists(plan_boundary_folds(rows, align, RING, BLOCK))
    assert (slots, rings) == (rows.slots.tolist(), rows.buffers.tolist())
    num_reached = 0
    for index in range(num_rows):
        numbers = [int(x[index]) for x in (align.computed, align.scheduled, align.drafts, align.accepted)]
        copy = plan_align_copy(*numbers, 0, BLOCK)
        target = int(align.targets[index])
        is_reached = copy is not None and target != PAD_SLOT and slots[index] != PAD_SLOT
        assert targets[index] == (target if is_reached else PAD_SLOT)
        assert folded[index] == max(int(rows.folded[index]), numbers[0] // RING * RING)
        if is_reached:
            assert copy is not None and ends[index] == (copy.destination_column + 1) * BLOCK >= folded[index]
        num_reached += is_reached
    assert num_reached or num_rows < 5


@pytest.mark.parametrize("num_rows", [1, 63, 257])
def test_boundary_plan_kernel_equals_its_reference(num_rows: int, device: str) -> None:
    rows, align = random_step(num_rows, device)
    planned = plan_boundary_folds(rows, align, RING, BLOCK), plan_boundary_folds_ref(rows, align, RING, BLOCK)
    assert lists(planned[0]) == lists(planned[1])
