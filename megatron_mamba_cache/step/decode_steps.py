"""Update a decode step's buffers incrementally while no request's draft count changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_

import numpy as np
import numpy.typing as npt

from ..policy.random_counter import DrawPurpose
from ..policy.requests import RunningRequest
from ..recurrences.batches import PAD_SLOT
from .batch import StepBatch, write_live_states
from .buffers import StepBuffers
from .logits import Draws, write_next_uniforms, write_uniforms

_COUNTED_BY_REQUEST = ("computed", "kv_lengths", "last_block_lens")
"""Sections that grow by the tokens that a request keeps."""


@dataclass(frozen=True, slots=True)
class RequestEnds:
    """End tokens and length limits of the requests of a step.

    Args:
        end_ids: [requests, most end tokens of a request] int64, the last ones of longer stop words among them; -1 for
            none.
        max_lens: [requests] int64; prompt and generated tokens together.
    """

    end_ids: npt.NDArray[np.int64]
    max_lens: npt.NDArray[np.int64]

    @staticmethod
    def of(requests: Sequence[RunningRequest]) -> "RequestEnds":
        """Return the end tokens and length limits of the requests."""
        settings = [request.spec.sampling for request in requests]
        ends = [(*sampling.end_ids, *(word[-1] for word in sampling.stop_words)) for sampling in settings]
        end_ids = np.full((len(requests), max(map(len, ends), default=1)), -1, np.int64)
        for row, found in enumerate(ends):
            end_ids[row, : len(found)] = found
        return RequestEnds(end_ids, np.array([request.spec.max_len for request in requests], np.int64))

    def any_ends(self, tokens: Sequence[int]) -> bool:
        """Return whether any new token may end its request; a stop word's last token may, but need not."""
        return bool((np.array(tokens, np.int64)[:, None] == self.end_ids).any())


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Decode step that was sent to the device.

    Args:
        number: `StepBuffers.num_begun` when it was sent; the buffers hold this step until another one begins.
        widths: [requests] each request's tokens: one, and its drafts.
        ends: What ends the requests of a one-token step; None for another step.
        draws: How its tokens are sampled.
        has_new_blocks: True if a request has another KV block than in the step that this one continues.
    """

    requests: tuple[RunningRequest, ...]
    number: int
    widths: list[int]
    ends: RequestEnds | None
    draws: Draws
    has_new_blocks: bool = False

    @staticmethod
    def sent(requests: Sequence[RunningRequest], buffers: StepBuffers) -> "DecodeStep | None":
        """Return the step whose requests were written to the buffers and sent last, None if any of them prefills."""
        if requests and requests[-1].is_prefilling:
            return None
        widths = [request.scheduled for request in requests]
        return DecodeStep(tuple(requests), buffers.num_begun, widths, _ends_of(requests), Draws.of(requests))

    def continues(self, requests: Sequence[RunningRequest], buffers: StepBuffers, block_size: int) -> bool:
        """Return whether a step has the same requests, each advanced by its kept tokens within its KV block."""
        if not self._is_sent_last(requests, buffers) or [request.scheduled for request in requests] != self.widths:
            return False
        if any(request.is_prefilling for request in requests):
            return False
        num_requests = len(requests)
        before = buffers.host("computed")[:num_requests]
        computed = np.fromiter((request.computed for request in requests), np.int32, num_requests)
        kept = np.fromiter((request.cursor.accepted for request in requests), np.int32, num_requests)
        last = computed + buffers.host("scheduled")[:num_requests] - 1
        return bool(((computed - before == kept) & (before // block_size == last // block_size)).all())

    def can_launch_next(
        self, requests: Sequence[RunningRequest], tokens: Sequence[int] | None, buffers: StepBuffers
    ) -> bool:
        """Return whether the step after this one, which has not landed, is a one-token step of the same requests.

        Args:
            tokens: [requests] this step's tokens; None while they are unknown: requests that end leave the next step.
        """
        if self.ends is None or not self._is_sent_last(requests, buffers):
            return False
        if tokens is not None and self.ends.any_ends(tokens):
            return False
        computed = buffers.host("computed")[: len(requests)] + 1  # value in the next step
        return not (computed + 1 >= self.ends.max_lens).any()

    def _is_sent_last(self, requests: Sequence[RunningRequest], buffers: StepBuffers) -> bool:
        same_number = buffers.num_begun == self.number and len(requests) == len(self.requests)
        return same_number and all(map(is_, requests, self.requests))


@dataclass(frozen=True, slots=True)
class SentStep:
    """Decode step that a graph sent, with its batch."""

    graph: object
    step: DecodeStep
    batch: StepBatch


class LatestStep:
    """Last step sent by the graphs of one memory if it was a decode step, which the next step may continue."""

    def __init__(self) -> None:
        self._sent: SentStep | None = None

    def note(self, sent: SentStep | None) -> None:
        """Store the step that was sent; None for a step with prefill."""
        self._sent = sent

    def of(self, graph: object) -> SentStep | None:
        """Return the stored step if this graph sent it."""
        return self._sent if self._sent is not None and self._sent.graph is graph else None


def send_again(
    last: DecodeStep, requests: Sequence[RunningRequest], buffers: StepBuffers, block_size: int, num_table_rows: int
) -> DecodeStep:
    """Send a step that continues the last one, as `DecodeStep.continues` has checked, and return it.

    Args:
        num_table_rows: Rows of the block table that the step uses, padding included.
    """
    num_requests, num_tokens = len(requests), sum(last.widths)
    buffers.begin()
    kept = np.fromiter((request.cursor.accepted for request in requests), np.int32, num_requests)
    for name in _COUNTED_BY_REQUEST:
        buffers.host(name)[:num_requests] += kept
    kept_by_token = np.repeat(kept, buffers.host("scheduled")[:num_requests])
    buffers.host_int64("token_positions")[:num_tokens] += kept_by_token
    buffers.host("token_offsets")[:num_tokens] += kept_by_token
    inputs = chain.from_iterable(request.inputs for request in requests)
    buffers.host_int64("token_ids")[:num_tokens] = np.fromiter(inputs, np.int64, num_tokens)
    has_new_blocks = _write_published_blocks(requests, buffers, block_size)
    write_live_states(requests, buffers)
    if last.draws is not Draws.BEST:
        write_uniforms("uniforms", DrawPurpose.SAMPLE, requests, buffers)
    buffers.send(num_table_rows)
    ends = last.ends or _ends_of(requests)
    return DecodeStep(last.requests, buffers.num_begun, last.widths, ends, last.draws, has_new_blocks)


def send_next(last: DecodeStep, buffers: StepBuffers, block_size: int, num_table_rows: int) -> DecodeStep:
    """Send the one-token step that follows one whose tokens are not read, and return it; the device feeds it.

    Args:
        num_table_rows: Rows of the block table that the step uses, padding included.
    """
    num_requests, fold_len = len(last.requests), buffers.limits.fold_len
    buffers.begin()
    if fold_len:  # position up to which the last step has folded
        folded = buffers.host("folded")[:num_requests]
        np.maximum(folded, buffers.host("computed")[:num_requests] // fold_len * fold_len, out=folded)
    for name in (*_COUNTED_BY_REQUEST, "token_offsets"):
        buffers.host(name)[:num_requests] += 1
    buffers.host_int64("token_positions")[:num_requests] += 1
    has_new_blocks = _write_edges(last.requests, buffers, block_size)
    if last.draws is not Draws.BEST:
        write_next_uniforms(last.requests, buffers)
    buffers.send(num_table_rows)
    return DecodeStep(last.requests, buffers.num_begun, last.widths, last.ends, last.draws, has_new_blocks)


def _write_edges(requests: Sequence[RunningRequest], buffers: StepBuffers, block_size: int) -> bool:
    """Write blocks and slots where a next token completes or begins a block, or a last token did.

    Returns:
        True if a request has another block than before.
    """
    if not ((buffers.host("computed")[: len(requests)] + 1) % block_size < 3).any():
        return False
    has_new_blocks = _write_published_blocks(requests, buffers, block_size)
    has_new_blocks |= _write_begun_blocks(requests, buffers, block_size)
    _write_boundaries(requests, buffers, block_size)
    return has_new_blocks


def _write_published_blocks(requests: Sequence[RunningRequest], buffers: StepBuffers, block_size: int) -> bool:
    """Write the blocks that requests completed two steps ago; return whether any request now holds another one.

    If another request published the same tokens first, the request now holds that request's block.
    """
    computed, table, is_new = buffers.host("computed")[: len(requests)], buffers.host_block_table(), False
    for row in np.flatnonzero(computed % block_size == 1).tolist():
        index = int(computed[row]) // block_size - 1
        if index >= 0 and table[row, index] != (block := requests[row].block_ids[index]):
            table[row, index], is_new = block, True
    return is_new


def _write_begun_blocks(requests: Sequence[RunningRequest], buffers: StepBuffers, block_size: int) -> bool:
    """Write the ids of blocks that requests start to fill; return whether there are any."""
    computed = buffers.host("computed")[: len(requests)]
    begun = np.flatnonzero(computed % block_size == 0)
    if not len(begun):
        return False
    index = computed[begun] // block_size
    blocks = [requests[row].block_ids[at] for row, at in zip(begun.tolist(), index.tolist(), strict=True)]
    buffers.host_block_table()[begun, index] = blocks
    buffers.host("token_blocks")[begun] = blocks
    buffers.host("token_offsets")[begun] = 0
    buffers.host("last_block_lens")[begun] = 1
    return True


def _write_boundaries(requests: Sequence[RunningRequest], buffers: StepBuffers, block_size: int) -> None:
    """Write the slots that are reserved for the boundaries which requests reach with their next token."""
    ends = buffers.host("computed")[: len(requests)] + 1
    slots = buffers.host("align_slots")[: len(requests)]
    slots[:] = PAD_SLOT
    for row in np.flatnonzero(ends % block_size == 0).tolist():
        slots[row] = next((state.slot for state in requests[row].reserved if state.position == ends[row]), PAD_SLOT)


def _ends_of(requests: Sequence[RunningRequest]) -> RequestEnds | None:
    """Return the end conditions if the device can continue the step by itself, else None."""
    decodes_one_each = all(
        request.scheduled == 1 and request.cursor.accepted == 1  # the next step has the same values
        for request in requests
    )
    return RequestEnds.of(requests) if decodes_one_each else None
