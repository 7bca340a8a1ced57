"""Steps that go on from the one before hold what laying them out anew would, and no other step is taken for one."""

import random

import pytest

from megatron_mamba_cache.policy.identifiers import BlockId, SlotId
from megatron_mamba_cache.policy.requests import ReservedState, RunningRequest, SamplingSettings
from megatron_mamba_cache.state.padded_step import StepShape
from megatron_mamba_cache.state.plain_steps import PlainStep, send_next
from megatron_mamba_cache.state.step_batch import lay_out_step, send_padded_step
from megatron_mamba_cache.state.step_buffers import StepBuffers
from tests.state.test_step_batch import BLOCK, GEOMETRY, LIMITS, decoding

SHAPES = (StepShape(6, 1), StepShape(6, 4))
MOST_COMPUTED = LIMITS.max_blocks * BLOCK - LIMITS.max_drafts
SAMPLED = SamplingSettings(temperature=0.7, seed=3)


def send_anew(rows: list[RunningRequest], buffers: StepBuffers, shape: StepShape) -> None:
    send_padded_step(shape.pad(rows, GEOMETRY.dummy_block), buffers, GEOMETRY, shape)


def send(
    rows: list[RunningRequest], buffers: StepBuffers, shape: StepShape, last: PlainStep | None
) -> tuple[PlainStep | None, bool]:
    """Send a step the quick way if there is one; return what the next may go on from, and whether there was."""
    if last is not None and last.goes_on(rows, buffers, GEOMETRY.block_size):
        return send_next(last, buffers, shape.num_rows), True
    send_anew(rows, buffers, shape)
    return PlainStep.sent(rows, buffers), False


def same(buffers: StepBuffers, expected: StepBuffers) -> bool:
    return all(buffers.device(name).equal(expected.device(name)) for name in StepBuffers.SECTIONS)


def advance(row: RunningRequest, draw: random.Random) -> None:
    """Finish the row's step and schedule the next one, as an engine does; without drafts unless some are drawn."""
    kept = draw.randrange(1, row.scheduled + 1)
    row.generated += [draw.randrange(1000) for _ in range(kept)]
    row.computed += kept
    row.accepted, row.drafts, row.reserved = kept, (), []
    row.scheduled = 1
    while row.computed >= len(row.block_ids) * BLOCK:
        row.block_ids.append(BlockId(draw.randrange(50)))


def disturb(rows: list[RunningRequest], shape: StepShape, draw: random.Random) -> None:
    """Change what no step goes on over."""
    row = draw.choice(rows)
    change = draw.randrange(6)
    if change == 0 and shape.width > 1:
        row.drafts = tuple(draw.randrange(1000) for _ in range(draw.randrange(1, shape.width)))
        row.scheduled = 1 + len(row.drafts)
        row.draft_slots = [SlotId(draw.randrange(60)) for _ in row.drafts]
    elif change == 1:
        row.reserved = [ReservedState((row.computed // BLOCK + 1) * BLOCK, SlotId(draw.randrange(60)))]
    elif change == 2:
        row.live_slot = SlotId(draw.randrange(60))
    elif change == 3 and len(rows) > 1:
        rows.remove(row)
    elif change == 4 and len(rows) < shape.num_decode_rows:
        rows.append(decoding(len(rows), prompt_len=draw.randrange(1, 20), num_generated=draw.randrange(1, 5)))
    else:
        draw.shuffle(rows)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_is_as_if_laid_out_anew(device: str, shape: StepShape, seed: int) -> None:
    draw = random.Random(seed)
    rows = [decoding(index, prompt_len=draw.randrange(1, 20), num_generated=1 + index) for index in range(4)]
    buffers, expected = StepBuffers(LIMITS, device), StepBuffers(LIMITS, device)
    last, num_quick = None, 0
    for _ in range(60):
        if draw.random() < 0.1:
            disturb(rows, shape, draw)
        if draw.random() < 0.05:  # a step of another shape, or without one
            for each in (buffers, expected):
                lay_out_step(rows[:1], each, GEOMETRY)
        last, was_quick = send(rows, buffers, shape, last)
        num_quick += was_quick
        send_anew(rows, expected, shape)
        assert same(buffers, expected)
        for row in rows:
            advance(row, draw)
        rows = [row for row in rows if row.computed < MOST_COMPUTED] or [decoding(0)]
    assert num_quick >= 5


def test_rows_that_draw_are_never_plain(device: str) -> None:
    buffers, rows = StepBuffers(LIMITS, device), [decoding(0), decoding(1, sampling=SAMPLED)]
    send_anew(rows, buffers, SHAPES[0])
    assert PlainStep.sent(rows, buffers) is None
    assert PlainStep.sent(rows[:1], buffers) is not None


@pytest.mark.parametrize("change", ["another row", "a prompt to prefill", "another step", "no step between"])
def test_a_step_that_only_looks_alike_does_not_go_on(device: str, change: str) -> None:
    buffers, rows = StepBuffers(LIMITS, device), [decoding(0, prompt_len=3), decoding(1, prompt_len=3)]
    send_anew(rows, buffers, SHAPES[0])
    last = PlainStep.sent(rows, buffers)
    assert last is not None
    if change != "no step between":
        for row in rows:
            advance(row, random.Random(0))
        assert last.goes_on(rows, buffers, GEOMETRY.block_size)
    if change == "another row":
        rows[1] = decoding(1, prompt_len=3, num_generated=2)
    elif change == "another step":  # of rows in other blocks, as far as these were
        lay_out_step([decoding(index, prompt_len=3) for index in range(2)], buffers, GEOMETRY)
        assert buffers.host("computed")[:2].tolist() == [row.computed - 1 for row in rows]
    elif change == "a prompt to prefill":
        rows[1].spec = decoding(1, prompt_len=30).spec
    assert not last.goes_on(rows, buffers, GEOMETRY.block_size)
