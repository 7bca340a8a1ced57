"""Decode steps that are padded to the shape of a captured graph."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..kernels.varlen_rows import PAD_SLOT
from ..policy.requests import RunningRequest
from .step_buffers import StepBuffers


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Rows of a captured decode step, and the most tokens of each: one and its drafts."""

    num_rows: int
    width: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the graph computes."""
        return self.num_rows * self.width


def smallest_shape(rows: Sequence[RunningRequest], shapes: Iterable[DecodeShape]) -> DecodeShape | None:
    """Return the narrowest shape, of these the smallest, that holds the rows; None if none does or a row prefills."""
    if any(row.is_prefilling for row in rows):
        return None
    num_rows, width = len(rows), max((row.scheduled for row in rows), default=0)
    fitting = [shape for shape in shapes if shape.num_rows >= num_rows and shape.width >= width]
    return min(fitting, key=lambda shape: (shape.width, shape.num_rows), default=None)


def graph_shapes(count: int, max_rows: int, max_drafts: int, max_tokens: int) -> list[DecodeShape]:
    """Return shapes to capture: about `count` numbers of rows, each without drafts and with the most."""
    return [
        DecodeShape(num_rows, width)
        for width in sorted({1, 1 + max_drafts})
        for num_rows in _row_numbers(count, min(max_rows, max_tokens // width))
    ]


def _row_numbers(count: int, max_rows: int) -> list[int]:
    """Return up to `count` numbers of rows that grow by the same factor each, the last being `max_rows`.

    So no step computes many times the rows that it has. From 8 on they are multiples of 8, which take products as long.
    """
    if not max_rows:
        return []
    numbers = [round(float(number)) for number in np.geomspace(1, max_rows, count)] if count > 1 else [max_rows]
    return sorted({min(number if number <= 8 else -(-number // 8) * 8, max_rows) for number in numbers})


def pad_step(rows: Sequence[RunningRequest], buffers: StepBuffers, dummy_block: int, shape: DecodeShape) -> None:
    """Write padding behind the rows of a step that is written: rows of no tokens, and tokens that are nobody's."""
    num_rows, num_tokens = len(rows), sum(row.scheduled for row in rows)
    unused_rows, unused_tokens = slice(num_rows, shape.num_rows), slice(num_tokens, shape.num_tokens)
    for name, value in (("token_ids", 0), ("token_positions", 0), ("token_blocks", dummy_block), ("token_offsets", 0)):
        buffers.host(name)[unused_tokens] = value
    for name in ("scheduled", "computed", "kv_lengths", "num_drafts", "top_k"):
        buffers.host(name)[unused_rows] = 0
    for name in ("temperature", "top_p"):
        buffers.host(name).view(np.float32)[unused_rows] = 0.0
    buffers.host("accepted")[unused_rows] = 1
    buffers.host("align_slots")[unused_rows] = PAD_SLOT
    buffers.host_columns()[unused_rows] = PAD_SLOT
    num_logits = int(buffers.host("cu_logits")[num_rows])
    for name, end in (("cu_query", num_tokens), ("cu_logits", num_logits)):
        buffers.host(name)[num_rows + 1 : shape.num_rows + 1] = end
    for name in ("logit_tokens", "logit_rows"):
        buffers.host(name)[num_logits : shape.num_tokens] = 0
    for name in ("uniforms", "accept_uniforms", "residual_uniforms"):
        buffers.host(name).view(np.float64)[num_logits : shape.num_tokens] = 0.0
