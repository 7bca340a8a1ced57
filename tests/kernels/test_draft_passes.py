"""Inputs of the next draft pass, for kernel and reference.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

from collections.abc import Callable
from dataclasses import fields
from random import Random

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.sampling import draft_passes
from megatron_mamba_cache.kernels.sampling.draft_passes import DraftRows, advance_drafts, advance_drafts_ref
from tests.kernels.kernel_stand_ins import launches_expected

BLOCK, MAX_BLOCKS, MAX_DRAFTS, DUMMY = 8, 4, 5, 99


def rows_of(newest: list[int], num_drafts: list[int], device: str) -> DraftRows:
    """Return rows before the first pass; block b of request r is 10 * r + b."""
    position = torch.tensor(newest, dtype=torch.int32, device=device)
    table = 10 * torch.arange(len(newest), dtype=torch.int32, device=device)[:, None] + torch.arange(
        MAX_BLOCKS, dtype=torch.int32, device=device
    )
    return DraftRows(
        token_ids=torch.full((len(newest),), -1, device=device),
        positions=position.to(torch.int64),
        token_blocks=table.gather(1, (position // BLOCK).long()[:, None])[:, 0],
        token_offsets=position % BLOCK,
        kv_lengths=position + 1,
        last_block_lens=position % BLOCK + 1,
        num_found=torch.zeros_like(position),
        newest=position.clone(),
        num_drafts=torch.tensor(num_drafts, dtype=torch.int32, device=device),
        block_table=table,
        dummy_block=DUMMY,
        block_size=BLOCK,
    )


def values_of(rows: DraftRows) -> dict[str, list[int]]:
    return {
        field.name: found.tolist() for field in fields(rows) if isinstance(found := getattr(rows, field.name), Tensor)
    }


@pytest.mark.parametrize("advance", [advance_drafts, advance_drafts_ref])
def test_each_pass_writes_one_position_of_the_requests_that_need_it(advance: Callable[..., None], device: str) -> None:
    random = Random(0)
    newest = [random.randint(0, BLOCK * MAX_BLOCKS - MAX_DRAFTS) for _ in range(30)]
    lengths = [random.randint(0, MAX_DRAFTS) for _ in newest]
    rows, drafts = rows_of(newest, lengths, device), torch.full((len(newest), MAX_DRAFTS), -1, device=device)
    with launches_expected(draft_passes, "_advance_kernel", of_kernel=advance is advance_drafts, device=device):
        for number in range(1, MAX_DRAFTS + 2):
            found = torch.arange(len(newest), device=device) * 1000 + number
            advance(found, drafts, rows)
            values = values_of(rows)
            assert values["token_ids"] == found.tolist()
            for row, (start, length) in enumerate(zip(newest, lengths, strict=True)):
                position = start + min(number, max(length - 1, 0))
                block = 10 * row + position // BLOCK if number < length else DUMMY
                assert values["positions"][row] == position == values["kv_lengths"][row] - 1
                assert values["token_blocks"][row] == block
                assert values["token_offsets"][row] == position % BLOCK == values["last_block_lens"][row] - 1
    for row, (stored, length) in enumerate(zip(drafts.tolist(), lengths, strict=True)):
        assert stored == [1000 * row + number for number in range(1, length + 1)] + [-1] * (MAX_DRAFTS - length)
