"""Steps that follow an outcome on the device, for kernels and references.

Without a GPU or the interpreter, an op is its reference; `test_interpreted` runs this file again.
"""

from collections.abc import Callable
from random import Random

import pytest
import torch

from megatron_mamba_cache.kernels.sampling import followed_steps
from megatron_mamba_cache.kernels.sampling.draft_passes import DraftRows
from megatron_mamba_cache.kernels.sampling.followed_steps import (
    FollowedRows,
    begin_drafts,
    begin_drafts_ref,
    follow_step,
    follow_step_ref,
)
from tests.kernels.kernel_stand_ins import launches_expected

BLOCK, MAX_BLOCKS, MOST, DUMMY = 8, 6, 5, 99
WIDTHS = [3, 1, 0, MOST, 2, 0, 4, MOST, MOST]
SEEDS = range(5)


def step_of(draw: Random, device: str) -> FollowedRows:
    """Return a step of requests with `WIDTHS` tokens; block b of request r is 10 * r + b."""
    num_rows, num_tokens = len(WIDTHS), sum(WIDTHS)
    computed = [draw.randrange(BLOCK * MAX_BLOCKS - 2 * MOST) if width else 0 for width in WIDTHS]
    starts = torch.tensor([0, *WIDTHS]).cumsum(0)

    def of_rows() -> torch.Tensor:
        return torch.full((num_rows,), -7, dtype=torch.int32, device=device)

    def of_tokens(dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_tokens + 3,), -7, dtype=dtype, device=device)  # padding follows the tokens

    uniforms = torch.arange(num_tokens + 3, device=device)
    table = 10 * torch.arange(num_rows)[:, None] + torch.arange(MAX_BLOCKS)
    return FollowedRows(
        cu_tokens=starts.to(device, torch.int32),
        computed=torch.tensor(computed, dtype=torch.int32, device=device),
        accepted=of_rows(),
        kv_lengths=of_rows(),
        last_block_lens=of_rows(),
        token_ids=of_tokens(torch.int64),
        positions=of_tokens(torch.int64),
        token_blocks=of_tokens(torch.int32),
        token_offsets=of_tokens(torch.int32),
        uniforms=uniforms,
        later_uniforms=1000 + uniforms,
        block_table=table.to(device, torch.int32),
    )


def outcome_of(draw: Random, device: str) -> torch.Tensor:
    """Return an outcome whose token at index i of request r is 100 * r + i."""
    lines = [
        [draw.randint(1, max(width, 1)), *(100 * row + column for column in range(MOST))]
        for row, width in enumerate(WIDTHS)
    ]
    return torch.tensor(lines, device=device)


def passes_of(device: str) -> DraftRows:
    names = ("token_blocks", "token_offsets", "kv_lengths", "last_block_lens", "num_found", "newest", "num_drafts")
    rows = {name: torch.full((len(WIDTHS),), -7, dtype=torch.int32, device=device) for name in names}
    wide = {name: torch.full((len(WIDTHS),), -7, device=device) for name in ("token_ids", "positions")}
    table = torch.zeros(len(WIDTHS), MAX_BLOCKS, dtype=torch.int32, device=device)
    return DraftRows(**rows, **wide, block_table=table, dummy_block=DUMMY, block_size=BLOCK)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("begin", [begin_drafts, begin_drafts_ref])
def test_first_pass_begins_at_the_last_accepted_token(begin: Callable[..., None], seed: int, device: str) -> None:
    draw = Random(seed)
    step, outcome, passes = step_of(draw, device), outcome_of(draw, device), passes_of(device)
    before = step.computed.tolist()
    with launches_expected(followed_steps, "_begin_kernel", of_kernel=begin is begin_drafts, device=device):
        begin(outcome, step, passes)
    for row, width in enumerate(WIDTHS):
        accepted = int(outcome[row, 0])
        position = before[row] + accepted if width else 0
        assert passes.token_ids[row] == outcome[row, accepted]
        assert passes.positions[row] == passes.newest[row] == passes.kv_lengths[row] - 1 == position
        assert passes.token_blocks[row] == 10 * row + position // BLOCK
        assert passes.token_offsets[row] == passes.last_block_lens[row] - 1 == position % BLOCK
        assert passes.num_found[row] == 0
        assert passes.num_drafts[row] == max(width - 1, 0)
    assert step.computed.tolist() == before


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("follow", [follow_step, follow_step_ref])
def test_next_step_has_the_last_accepted_token_and_its_drafts(
    follow: Callable[..., None], seed: int, device: str
) -> None:
    draw = Random(seed)
    step, outcome = step_of(draw, device), outcome_of(draw, device)
    drafts = 10_000 + torch.arange(len(WIDTHS) * (MOST + 1), device=device).view(len(WIDTHS), -1)
    before = step._replace(computed=step.computed.clone(), uniforms=step.uniforms.clone())
    with launches_expected(followed_steps, "_follow_kernel", of_kernel=follow is follow_step, device=device):
        follow(outcome, drafts, step, BLOCK)
    for row, width in enumerate(WIDTHS):
        accepted, start = int(outcome[row, 0]), int(step.cu_tokens[row])
        if not width:
            assert step.computed[row] == 0
            assert step.accepted[row] == step.kv_lengths[row] == step.last_block_lens[row] == -7
            continue
        first, tokens = int(before.computed[row]) + accepted, slice(start, start + width)
        positions = list(range(first, first + width))
        assert step.computed[row] == first
        assert step.accepted[row] == accepted
        assert step.kv_lengths[row] == first + width
        assert step.last_block_lens[row] == (first + width - 1) % BLOCK + 1
        assert step.token_ids[tokens].tolist() == [int(outcome[row, accepted]), *drafts[row, : width - 1].tolist()]
        assert step.positions[tokens].tolist() == positions
        assert step.token_blocks[tokens].tolist() == [10 * row + position // BLOCK for position in positions]
        assert step.token_offsets[tokens].tolist() == [position % BLOCK for position in positions]
        numbers = before.uniforms[tokens].tolist() + before.later_uniforms[tokens].tolist()
        assert step.uniforms[tokens].tolist() == numbers[accepted - 1 :][:width]
    num_tokens = sum(WIDTHS)
    for section in (step.token_ids, step.positions, step.token_blocks, step.token_offsets):
        assert section[num_tokens:].tolist() == [-7] * 3
    assert step.uniforms[num_tokens:].tolist() == before.uniforms[num_tokens:].tolist()
