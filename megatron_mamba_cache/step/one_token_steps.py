"""Steps in which every row decodes one token and nothing else happens: a few additions turn one into the next."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np
import numpy.typing as npt

from ..policy.logits_settings import PLAIN_LOGITS
from ..policy.requests import RunningRequest
from .buffers import StepBuffers
from .logits import Draws, write_next_uniforms


@dataclass(frozen=True, slots=True)
class RowEnds:
    """What ends each row of a step: a token or a length.

    Args:
        end_ids: [rows, most end tokens of a row] int64; -1 for none.
        max_lens: [rows] int64; prompt and generated tokens together.
    """

    end_ids: npt.NDArray[np.int64]
    max_lens: npt.NDArray[np.int64]

    @staticmethod
    def of(rows: Sequence[RunningRequest]) -> "RowEnds | None":
        """Return what ends the rows, None if more of one is read between two steps: longer stop words or log-probs."""
        settings = [row.spec.sampling for row in rows]
        if any(row.spec.log_probs.wanted for row in rows) or any(
            len(word) != 1 for sampling in settings for word in sampling.stop_words
        ):
            return None
        ends = [(sampling.termination_id, *(word[0] for word in sampling.stop_words)) for sampling in settings]
        end_ids = np.full((len(rows), max(map(len, ends), default=1)), -1, np.int64)
        for place, found in enumerate(ends):
            end_ids[place, : len(found)] = found
        return RowEnds(end_ids, np.array([row.spec.max_len for row in rows], np.int64))

    def any_ends(self, tokens: Sequence[int]) -> bool:
        """Return whether any of the new tokens, [rows], ends its row."""
        return bool((np.array(tokens, np.int64)[:, None] == self.end_ids).any())


@dataclass(frozen=True, slots=True)
class OneTokenStep:
    """A step that was sent: one token a row, drawn from plain logits, no drafts, and no boundary within reach.

    What a row's grammar bars is known only when the step's tokens are: `LaunchedStep` verifies such a step later.

    Args:
        number: `StepBuffers.num_begun` when it was sent; the buffers hold this step until another one begins.
        ends: None if new tokens alone do not tell whether a row continues.
        draws: How its tokens are drawn.
    """

    rows: tuple[RunningRequest, ...]
    number: int
    ends: RowEnds | None
    draws: Draws

    @staticmethod
    def sent(rows: Sequence[RunningRequest], buffers: StepBuffers) -> "OneTokenStep | None":
        """Return the step whose rows were written to the buffers and sent last, None if it is not a one-token step."""
        decodes_one_each = all(
            _decodes_one(row) and row.accepted == 1 and row.spec.sampling.logits is PLAIN_LOGITS for row in rows
        )  # a row keeps its settings, and has accepted one token in the step after this one as well
        if not decodes_one_each:
            return None
        return OneTokenStep(tuple(rows), buffers.num_begun, RowEnds.of(rows), Draws.of(rows))

    def continues(self, rows: Sequence[RunningRequest], buffers: StepBuffers, block_size: int) -> bool:
        """Return whether a step is this one with each row one token further, in the same KV block."""
        if not self._is_sent_last(rows, buffers) or not all(map(_decodes_one, rows)):
            return False
        num_rows = len(rows)
        computed = np.fromiter((row.computed for row in rows), np.int32, num_rows)
        slots = np.fromiter((row.live_slot for row in rows), np.int32, num_rows)
        return bool(
            (computed == buffers.host("computed")[:num_rows] + 1).all()
            and (computed % block_size).all()
            and (slots == buffers.host_columns()[:num_rows, 0]).all()
        )

    def can_launch_next(
        self,
        rows: Sequence[RunningRequest],
        tokens: Sequence[int] | None,
        buffers: StepBuffers,
        block_size: int,
    ) -> bool:
        """Return whether the next step is a one-token step too, with each row one token further.

        The rows have not advanced yet.

        Args:
            tokens: [rows] the step's new tokens; None while they are unknown: rows that end leave the next step.
        """
        if self.ends is None or not self._is_sent_last(rows, buffers):
            return False
        if tokens is not None and self.ends.any_ends(tokens):
            return False
        computed = buffers.host("computed")[: len(rows)] + 1  # as the next step will find it
        needs_block_or_state = (computed % block_size == 0) | ((computed + 1) % block_size == 0)
        return not ((computed + 1 >= self.ends.max_lens) | needs_block_or_state).any()

    def _is_sent_last(self, rows: Sequence[RunningRequest], buffers: StepBuffers) -> bool:
        same_number = buffers.num_begun == self.number and len(rows) == len(self.rows)
        return same_number and all(map(is_, rows, self.rows))


def send_next(
    last: OneTokenStep, tokens: Sequence[int] | None, buffers: StepBuffers, num_table_rows: int
) -> OneTokenStep:
    """Send the step that follows the last one, and return it.

    Args:
        tokens: [rows] each row's newest token, the input of the step; None if the device feeds it.
        num_table_rows: Rows of the block table that the step uses, padding included.
    """
    num_rows, ring_len = len(last.rows), buffers.limits.ring_len
    buffers.begin()
    if ring_len:  # the last step has folded up to here
        folded = buffers.host("folded")[:num_rows]
        np.maximum(folded, buffers.host("computed")[:num_rows] // ring_len * ring_len, out=folded)
    for name in ("computed", "kv_lengths", "token_positions", "token_offsets"):
        buffers.host(name)[:num_rows] += 1
    if tokens is not None:
        buffers.host("token_ids")[:num_rows] = tokens
    if last.draws is not Draws.BEST:
        write_next_uniforms(last.rows, buffers)
    buffers.send(num_table_rows)
    return OneTokenStep(last.rows, buffers.num_begun, last.ends, last.draws)


def _decodes_one(row: RunningRequest) -> bool:
    return row.scheduled == 1 and not row.drafts and not row.reserved and not row.is_prefilling
