"""temp"""
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AlignRows:
    computed: Tensor
    scheduled: Tensor
    drafts: Tensor
    accepted: Tensor
    columns: Tensor
    state_columns: Tensor
    targets: Tensor
def align_copy(conv_pool, ssm_pool, rows, block_size, window_len):
    running = rows.computed + rows.scheduled - rows.drafts
    new = running + rows.accepted.clamp_min(1) - 1
    aligned = new // block_size * block_size
    for r in range(len(rows.computed)):
        if aligned[r] >= running[r] and rows.targets[r] >= 0 and rows.columns[r, 0] >= 0:
            shift = int(aligned[r] - running[r])
            ssm_pool[:, rows.targets[r]] = ssm_pool[:, rows.columns[r, shift]]
            conv_pool[:, rows.targets[r], :window_len] = conv_pool[:, rows.columns[r, 0], shift:shift + window_len].clone()
