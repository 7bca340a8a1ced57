"""Requests in verify steps, and the align copies that the host expects for them."""

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
class StepRequest:
    """One request of a step, with the fields of `AlignBatch`."""

    computed: int
    scheduled: int
    drafts: int
    accepted: int
    columns: tuple[int, ...]
    target: int
    state_column: int = 0

    def plan(self, block_size: int) -> AlignCopy | None:
        """Return the align copy that the host plans for the request."""
        return plan_align_copy(self.computed, self.scheduled, self.drafts, self.accepted, self.state_column, block_size)


def padding_request(num_columns: int, target: int = PAD_SLOT) -> StepRequest:
    """Return a padding request whose counts would reach a boundary of any block size below 7."""
    return StepRequest(6, 7, 6, 7, (PAD_SLOT,) * num_columns, target)


def device_batch(rows: Sequence[StepRequest], device: str, accepted_dtype: torch.dtype = torch.int64) -> AlignBatch:
    """Return the requests on `device`; `accepted` is the first column of a wider table."""
    num_columns = len(rows[0].columns) if rows else 1

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    packed = torch.full((len(rows), 3), 99, dtype=accepted_dtype, device=device)
    packed[:, 0] = int32([request.accepted for request in rows])
    return AlignBatch(
        computed=int32([request.computed for request in rows]),
        scheduled=int32([request.scheduled for request in rows]),
        drafts=int32([request.drafts for request in rows]),
        accepted=packed[:, 0],
        columns=int32([slot for request in rows for slot in request.columns]).view(len(rows), num_columns),
        state_columns=int32([request.state_column for request in rows]),
        targets=int32([request.target for request in rows]),
    )


@dataclass(frozen=True, slots=True)
class Pools:
    """A conv pool and an SSM pool, with their expected contents after an align copy."""

    conv: Tensor
    ssm: Tensor

    def clone(self) -> "Pools":
        """Copy the pools with the same strides; bytes between states are not copied."""
        return Pools(self.conv.clone(), self.ssm.clone())

    def planned(self, rows: Sequence[StepRequest], block_size: int, window_len: int) -> "Pools":
        """Return new pools that contain the result of the planned copies."""
        after = self.clone()
        for request in rows:
            plan = request.plan(block_size)
            if plan is None or request.target == PAD_SLOT or request.columns[request.state_column] == PAD_SLOT:
                continue
            window = slice(plan.shift, plan.shift + window_len)
            after.conv[:, request.target, :window_len] = self.conv[:, request.columns[request.state_column], window]
            after.ssm[:, request.target] = self.ssm[:, request.columns[plan.source_column]]
        return after


def within_pools(op: Callable[..., None]) -> Callable[..., None]:
    """Return an align copy within a conv pool and an SSM pool."""

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
    """Return an align copy from a conv pool to `ends` and from an SSM pool to quantized states."""

    def run(
        conv: Tensor,
        ssm: Tensor,
        rows: AlignBatch,
        block_size: int,
        window_len: int,
        ends: Tensor,
        quantized: QuantizedStates,
        *,
        drafts: DraftInputs | None = None,
    ) -> None:
        op([StateMove(conv, ends, window_len, drafts), StateMove(ssm, quantized)], rows, block_size)

    return run
