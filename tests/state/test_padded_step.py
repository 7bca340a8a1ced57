"""Decode steps that are padded to a shape: what the rows are given, what padding is given, and which shape is taken."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.kernels.varlen_rows import PAD_SLOT
from megatron_mamba_cache.state.padded_step import DecodeShape, graph_shapes, smallest_shape
from megatron_mamba_cache.state.step_batch import send_padded_step, view_step
from megatron_mamba_cache.state.step_buffers import StepBuffers
from tests.state.test_step_batch import GEOMETRY, LIMITS, random_decode, row_of

SHAPE = DecodeShape(6, 4)


def some_rows(draw: random.Random, most_rows: int, most_drafts: int) -> list:
    return [random_decode(index, draw, most_drafts) for index in range(draw.randrange(most_rows + 1))]


def filled_with_junk(device: str) -> StepBuffers:
    """Return buffers as a larger step may have left them, its block ids and slots of somebody else."""
    buffers = StepBuffers(LIMITS, device)
    for name in StepBuffers.SECTIONS:
        buffers.host(name)[:] = 7
    buffers.send(LIMITS.max_rows)
    return buffers


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_laid_out_as_without_padding_and_padding_owns_nothing(device: str, seed: int) -> None:
    rows = some_rows(random.Random(seed), SHAPE.num_rows, SHAPE.width - 1)
    plain, padded = StepBuffers(LIMITS, device), filled_with_junk(device)
    send_padded_step(rows, plain, GEOMETRY, DecodeShape(len(rows), max([row.scheduled for row in rows], default=1)))
    send_padded_step(rows, padded, GEOMETRY, SHAPE)

    def section(buffers: StepBuffers, name: str) -> np.ndarray:
        return buffers.device(name).cpu().numpy()

    num_rows, num_tokens = len(rows), sum(row.scheduled for row in rows)
    num_logits = sum(1 + len(row.drafts) for row in rows)
    per_token = ("token_ids", "token_positions", "token_blocks", "token_offsets")
    per_row = ("kv_lengths", "computed", "scheduled", "num_drafts", "accepted", "align_slots", "temperature", "top_k")
    per_logit = ("logit_tokens", "logit_rows")
    for names, count in ((per_token, num_tokens), ((*per_row, "top_p"), num_rows), (per_logit, num_logits)):
        for name in names:
            assert np.array_equal(section(plain, name)[:count], section(padded, name)[:count]), name
    for name in ("cu_query", "cu_logits"):
        assert np.array_equal(section(plain, name)[: num_rows + 1], section(padded, name)[: num_rows + 1])
        assert (section(padded, name)[num_rows : SHAPE.num_rows + 1] == section(padded, name)[num_rows]).all()
    assert (section(padded, "token_blocks")[num_tokens : SHAPE.num_tokens] == GEOMETRY.dummy_block).all()
    columns = padded.device_columns().cpu().numpy()
    assert (columns[num_rows : SHAPE.num_rows] == PAD_SLOT).all()
    assert np.array_equal(columns[:num_rows], plain.device_columns().cpu().numpy()[:num_rows])
    for name, expected in (("align_slots", PAD_SLOT), ("kv_lengths", 0), ("scheduled", 0), ("accepted", 1)):
        assert (section(padded, name)[num_rows : SHAPE.num_rows] == expected).all(), name
    for name in per_logit:
        assert (section(padded, name)[num_logits : SHAPE.num_tokens] == 0).all()
    uniforms = section(padded, "uniforms").view(np.float64)[: SHAPE.num_tokens]
    assert ((uniforms >= 0) & (uniforms < 1)).all()


def test_views_of_a_shape_are_of_its_size_and_read_what_is_sent_later(device: str) -> None:
    buffers = StepBuffers(LIMITS, device)
    widest = [row_of(i, prompt_len=1, computed=1, scheduled=3, num_generated=1, num_drafts=2) for i in range(2)]
    send_padded_step(widest, buffers, GEOMETRY, DecodeShape(2, 3))
    views = view_step(widest, buffers)
    assert views.decode is not None and views.decode.columns.shape[0] == 2 and views.decode.max_len == 3
    send_padded_step(widest[:1], buffers, GEOMETRY, DecodeShape(2, 3))
    assert views.attention.cu_query.tolist() == [0, 3, 3]
    assert views.decode.columns[1].eq(PAD_SLOT).all()
    assert torch.equal(views.token_blocks[3:].cpu(), torch.full((3,), GEOMETRY.dummy_block, dtype=torch.int32))


@given(st.data())
def test_the_smallest_shape_that_holds_a_step_is_taken(data: st.DataObject) -> None:
    count, drafts = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 8))
    max_rows = data.draw(st.integers(1, 80))
    max_tokens = data.draw(st.integers(max_rows, 800))
    shapes = graph_shapes(count, max_rows, drafts, max_tokens)
    assert len(shapes) == len(set(shapes)) <= 2 * count
    assert all(shape.num_tokens <= max_tokens and shape.num_rows <= max_rows for shape in shapes)
    assert max(shape.num_rows for shape in shapes if shape.width == 1) == max_rows
    num_rows = data.draw(st.integers(1, max_rows))
    rows = [row_of(i, prompt_len=1, computed=1, scheduled=1, num_generated=1) for i in range(num_rows)]
    shape = smallest_shape(rows, shapes)
    assert shape is not None and shape.width == 1
    assert shape.num_rows == min(s.num_rows for s in shapes if s.width == 1 and s.num_rows >= num_rows)


def test_a_step_that_prefills_or_is_too_wide_has_no_shape() -> None:
    shapes = graph_shapes(3, 4, 2, 64)
    decoding = row_of(0, prompt_len=1, computed=1, scheduled=1, num_generated=1)
    prefilling = row_of(1, prompt_len=5, computed=1, scheduled=2)
    wide = row_of(2, prompt_len=1, computed=1, scheduled=4, num_generated=1, num_drafts=3)
    assert smallest_shape([decoding], shapes) == DecodeShape(1, 1)
    assert smallest_shape([decoding, prefilling], shapes) is None
    assert smallest_shape([wide], shapes) is None
    assert smallest_shape([decoding] * 5, shapes) is None
