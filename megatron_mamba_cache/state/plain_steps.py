"""Steps in which every row decodes one token and nothing else happens: the next is a few sums away from the last."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..policy.requests import RunningRequest
from .step_buffers import StepBuffers


@dataclass(frozen=True, slots=True)
class PlainStep:
    """A step that was sent: one token a row, drawn greedily, no drafts, and no boundary within reach.

    Args:
        number: How many steps had been sent with it; what the buffers hold is this step's until another is.
    """

    rows: tuple[RunningRequest, ...]
    number: int

    @staticmethod
    def sent(rows: Sequence[RunningRequest], buffers: StepBuffers) -> "PlainStep | None":
        """Return the step whose rows were written to the buffers and sent last, None if it is not a plain one."""
        is_plain = all(
            _decodes_one(row) and row.accepted == 1 and row.spec.sampling.is_greedy for row in rows
        )  # a row keeps its settings, and has accepted one token in the step after this one as well
        return PlainStep(tuple(rows), buffers.num_sent) if is_plain else None

    def goes_on(self, rows: Sequence[RunningRequest], buffers: StepBuffers, block_size: int) -> bool:
        """Return whether a step is this one, each row a token further in the block that it wrote to."""
        if buffers.num_sent != self.number or len(rows) != len(self.rows):
            return False
        if not all(row is before and _decodes_one(row) for row, before in zip(rows, self.rows, strict=True)):
            return False
        num_rows = len(rows)
        computed = np.fromiter((row.computed for row in rows), np.int32, num_rows)
        slots = np.fromiter((row.live_slot for row in rows), np.int32, num_rows)
        return bool(
            (computed == buffers.host("computed")[:num_rows] + 1).all()
            and (computed % block_size).all()
            and (slots == buffers.host_columns()[:num_rows, 0]).all()
        )


def send_next(last: PlainStep, buffers: StepBuffers, num_table_rows: int) -> PlainStep:
    """Send the step that the last one goes on to, and return it.

    Args:
        num_table_rows: Rows of the block table that the step uses, padding included.
    """
    num_rows = len(last.rows)
    for name in ("computed", "kv_lengths", "token_positions", "token_offsets"):
        buffers.host(name)[:num_rows] += 1
    buffers.host("token_ids")[:num_rows] = [row.generated[-1] for row in last.rows]
    buffers.send(num_table_rows)
    return PlainStep(last.rows, buffers.num_sent)


def _decodes_one(row: RunningRequest) -> bool:
    return row.scheduled == 1 and not row.drafts and not row.reserved and not row.is_prefilling
