"""Rows of verify steps on the host, and what the align copy must do to them, taken from the host's plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mamba_cache.policy.align import AlignCopy, plan_align_copy
from megatron_mamba_cache.recurrences.batches import PAD_SLOT, AlignBatch
from megatron_mamba_cache.recurrences.draft_inputs import DraftInputs
from megatron_mamba_cache.recurrences.moves import StateMove
from megatron_mamba_cache.recurrences.quantized_states import QuantizedStates


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row of a step; see `AlignBatch`."""

    computed: int
    scheduled: int
    drafts: int
    accepted: int
    columns: tuple[int, ...]
    target: int
    state_column: int = 0

    def plan(self, block_size: int) -> AlignCopy | None:
        """Return the host's plan."""
        return plan_align_copy(self.computed, self.scheduled, self.drafts, self.accepted, self.state_column, block_size)


def padding_row(num_columns: int, target: int = PAD_SLOT) -> StepRow:
    """Return a padded row whose counts would reach a boundary of any block size below 7."""
    return StepRow(6, 7, 6, 7, (PAD_SLOT,) * num_columns, target)


def device_rows(rows: Sequence[StepRow], device: str, accepted_dtype: torch.dtype = torch.int64) -> AlignBatch:
    """Return the rows on `device`; `accepted` is the first column of a wider table."""
    num_columns = len(rows[0].columns) if rows else 1

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    packed = torch.full((len(rows), 3), 99, dtype=accepted_dtype, device=device)
    packed[:, 0] = int32([row.accepted for row in rows])
    return AlignBatch(
        computed=int32([row.computed for row in rows]),
        scheduled=int32([row.scheduled for row in rows]),
        drafts=int32([row.drafts for row in rows]),
        accepted=packed[:, 0],
        columns=int32([slot for row in rows for slot in row.columns]).view(len(rows), num_columns),
        state_columns=int32([row.state_column for row in rows]),
        targets=int32([row.target for row in rows]),
    )


@dataclass(frozen=True, slots=True)
class Pools:
    """A conv pool and an SSM pool."""

    conv: Tensor
    ssm: Tensor

    def clone(self) -> "Pools":
        """Return a copy of the same strides, bytes between the states excepted."""
        return Pools(self.conv.clone(), self.ssm.clone())

    def planned(self, rows: Sequence[StepRow], block_size: int, window_len: int) -> "Pools":
        """Return what the host's plans make of the pools; these stay as they are."""
        after = self.clone()
        for row in rows:
            plan = row.plan(block_size)
            if plan is None or row.target == PAD_SLOT or row.columns[row.state_column] == PAD_SLOT:
                continue
            window = slice(plan.shift, plan.shift + window_len)
            after.conv[:, row.target, :window_len] = self.conv[:, row.columns[row.state_column], window]
            after.ssm[:, row.target] = self.ssm[:, row.columns[plan.source_column]]
        return after


def within_pools(op: Callable[..., None]) -> Callable[..., None]:
    """Return an align copy of a conv pool and an SSM pool, within both."""

    def run(
        conv: Tensor,
        ssm: Tensor,
        rows: AlignBatch,
        block_size: int,
        window_len: int,
        *tiling: object,
        drafts: DraftInputs | None = None,
    ) -> None:
        op([StateMove(conv, conv, window_len, drafts), StateMove(ssm, ssm)], rows, block_size, *tiling)

    return run


def quantizing(op: Callable[..., None]) -> Callable[..., None]:
    """Return an align copy of a conv pool into `ends` and of an SSM pool into quantized states."""

    def run(
        conv: Tensor,
        ssm: Tensor,
        rows: AlignBatch,
        block_size: int,
        window_len: int,
        ends: Tensor,
        places: QuantizedStates,
        *,
        drafts: DraftInputs | None = None,
    ) -> None:
        op([StateMove(conv, ends, window_len, drafts), StateMove(ssm, places)], rows, block_size)

    return run
