"""Run ops that store draft inputs in separate buffers with the same tests as ops that store them in slots.

A pool of whole windows is split into slots and buffers, the op runs, and the result is joined again.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_mamba_cache.recurrences.batches import PAD_SLOT, AlignBatch, DecodeBatch
from megatron_mamba_cache.recurrences.draft_inputs import DraftInputs
from tests.kernels.packed_batches import same_bits

_SPARE = 2  # unused rings
_NO_RING = 1000


def cut_window(pool: Tensor, slots: Tensor, window_len: int) -> tuple[Tensor, DraftInputs]:
    """Split windows: return the first inputs of all slots, and buffers, in another order, for the remaining inputs.

    Args:
        pool: [slots, window, conv_dim] or [layers, slots, ...].
        slots: [requests]; PAD_SLOT for padding.
    """
    num_rows = slots.shape[0]
    rings = torch.arange(num_rows, 0, -1, dtype=torch.int32, device=pool.device)
    draft_windows = pool[..., window_len:, :].index_select(-3, slots.clamp_min(0).long())
    shape = (*pool.shape[:-3], num_rows + _SPARE, *draft_windows.shape[-2:])
    inputs = torch.full(shape, float("nan"), dtype=pool.dtype, device=pool.device)
    inputs.index_copy_(-3, rings.long(), draft_windows)
    return pool[..., :window_len, :].clone(), DraftInputs(inputs, torch.where(slots == PAD_SLOT, _NO_RING, rings))


def conv_with_rings(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a decode convolution that takes whole windows, and calls `op` with split windows."""

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


def align_with_rings(op: Callable[..., None]) -> Callable[..., None]:
    """Return an align copy that takes whole windows, and calls `op` with split windows."""

    def run(conv: Tensor, ssm: Tensor, rows: AlignBatch, block_size: int, window_len: int, *others: object) -> None:
        # The counts of padding requests may be stale, so their column may be out of range.
        column = rows.state_columns.clamp_max(rows.columns.shape[1] - 1).long()
        sources = rows.columns.gather(1, column[:, None])[:, 0] if len(column) else column
        slots, drafts = cut_window(conv, sources, window_len)
        before = drafts.inputs.clone()
        op(slots, ssm, rows, block_size, window_len, *others, drafts=drafts)
        conv[:, :, :window_len] = slots
        assert same_bits(drafts.inputs, before), "an align copy only reads draft inputs"

    return run
