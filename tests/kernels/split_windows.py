"""Ops whose rows' conv windows go on beside their rings, called as those whose windows are in slots alone.

Tests of the one form run so with the other: a whole pool is cut, the op runs, and what it wrote is put together again.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_mamba_cache.recurrences.batches import PAD_SLOT, AlignBatch, DecodeBatch
from megatron_mamba_cache.recurrences.draft_inputs import DraftInputs
from tests.kernels.packed_batches import same_bits

_SPARE = 2  # rings of no row
_NO_RING = 1000


def cut_window(pool: Tensor, slots: Tensor, window_len: int) -> tuple[Tensor, DraftInputs]:
    """Return the first inputs of all slots, and the others of the rows' slots beside rings in another order.

    Args:
        pool: [slots, window, conv_dim] or [layers, slots, ...].
        slots: [rows]; PAD_SLOT for a padded row.
    """
    num_rows = slots.shape[0]
    rings = torch.arange(num_rows, 0, -1, dtype=torch.int32, device=pool.device)
    behind = pool[..., window_len:, :].index_select(-3, slots.clamp_min(0).long())
    shape = (*pool.shape[:-3], num_rows + _SPARE, *behind.shape[-2:])
    inputs = torch.full(shape, float("nan"), dtype=pool.dtype, device=pool.device)
    inputs.index_copy_(-3, rings.long(), behind)
    return pool[..., :window_len, :].clone(), DraftInputs(inputs, torch.where(slots == PAD_SLOT, _NO_RING, rings))


def conv_beside_rings(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a convolution of decode rows that takes whole windows and runs `op` on cut ones."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, rows: DecodeBatch, *tiling: object) -> Tensor:
        window_len, live = weight.shape[1] - 1, rows.columns[:, 0]
        slots, drafts = cut_window(pool, live, window_len)
        before = drafts.inputs.clone()
        y = op(x, weight, bias, slots, rows, *tiling, drafts=drafts)
        pool[:, :window_len] = slots
        for slot, ring in zip(live.tolist(), drafts.buffers.tolist(), strict=True):
            if slot != PAD_SLOT:
                pool[slot, window_len:] = drafts.inputs[ring]
        others = sorted(set(range(drafts.inputs.shape[0])) - set(drafts.buffers.tolist()))
        assert same_bits(drafts.inputs[others], before[others])
        return y

    return run


def align_beside_rings(op: Callable[..., None]) -> Callable[..., None]:
    """Return an align copy that takes whole windows and runs `op` on cut ones."""

    def run(conv: Tensor, ssm: Tensor, rows: AlignBatch, block_size: int, window_len: int, *others: object) -> None:
        # Counts of a padded row may be stale: its column need not be one of its columns.
        column = rows.state_columns.clamp_max(rows.columns.shape[1] - 1).long()
        sources = rows.columns.gather(1, column[:, None])[:, 0] if len(column) else column
        slots, drafts = cut_window(conv, sources, window_len)
        before = drafts.inputs.clone()
        op(slots, ssm, rows, block_size, window_len, *others, drafts=drafts)
        conv[:, :, :window_len] = slots
        assert same_bits(drafts.inputs, before), "an align copy reads what is beside rings"

    return run
