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
"""Sections whose values grow by the number of tokens that a request keeps in a step."""


@dataclass(frozen=True, slots=True)
class RequestEnds:
    """End tokens and length limits of a step's requests.

    Args:
        end_ids: [requests, most tokens] int64 tokens with which a request may end (`last_ids`); -1 for padding.
        max_lens: [requests] int64 maximum number of prompt and generated tokens.
    """

    end_ids: npt.NDArray[np.int64]
    max_lens: npt.NDArray[np.int64]

    @staticmethod
    def of(requests: Sequence[RunningRequest]) -> "RequestEnds":
        """Return the end tokens and length limits of the requests."""
        ends = [request.spec.sampling.last_ids for request in requests]
        end_ids = np.full((len(requests), max(map(len, ends), default=1)), -1, np.int64)
        for row, found in enumerate(ends):
            end_ids[row, : len(found)] = found
        return RequestEnds(end_ids, np.array([request.spec.max_len for request in requests], np.int64))

    def any_ends(self, tokens: Sequence[int]) -> bool:
        """Return whether any of the new tokens, one per request, may end its request or complete a stop string."""
        return bool((np.array(tokens, np.int64)[:, None] == self.end_ids).any())


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step that was sent to the device, with the data needed to derive the next step from it.

    Args:
        number: `StepBuffers.num_begun` when it was sent; the buffers hold this step until another one begins.
        widths: [requests] number of tokens per request: 1 + its drafts.
        ends: End conditions of the requests if each has one token; otherwise None.
        draws: Sampling method of the step.
        has_new_blocks: True if a request's block table differs from the preceding step's.
    """

    requests: tuple[RunningRequest, ...]
    number: int
    widths: list[int]
    ends: RequestEnds | None
    draws: Draws
    has_new_blocks: bool = False

    @staticmethod
    def sent(requests: Sequence[RunningRequest], buffers: StepBuffers) -> "DecodeStep | None":
        """Return a record of the step that was sent last, given its requests; None if any of them prefills."""
        if requests and requests[-1].is_prefilling:
            return None
        widths = [request.scheduled for request in requests]
        return DecodeStep(tuple(requests), buffers.num_begun, widths, _ends_of(requests), Draws.of(requests))

    def continues(self, requests: Sequence[RunningRequest], buffers: StepBuffers, block_size: int) -> bool:
        """Return whether the step of `requests` can be derived from this step by `send_again`.

        It must have the same requests and draft counts. Each request must have advanced by its kept tokens, and its new
        tokens must be in the same KV block as before.
        """
        if not self.is_sent_last(requests, buffers) or [request.scheduled for request in requests] != self.widths:
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
        """Return whether the next step can be launched now as a one-token decode step for the same requests.

        Args:
            tokens: [requests] tokens sampled in this step; None while unknown. With None, a request that has ended is
                computed once more, and the result is discarded.
        """
        if self.ends is None or not self.is_sent_last(requests, buffers):
            return False
        if tokens is not None and self.ends.any_ends(tokens):
            return False
        computed = buffers.host("computed")[: len(requests)] + 1  # value in the next step
        return not (computed + 1 >= self.ends.max_lens).any()

    def is_sent_last(self, requests: Sequence[RunningRequest], buffers: StepBuffers) -> bool:
        """Return whether the buffers still hold this step, and `requests` are its requests."""
        if buffers.num_begun != self.number or len(requests) != len(self.requests):
            return False
        return requests is self.requests or all(map(is_, requests, self.requests))


@dataclass(frozen=True, slots=True)
class SentStep:
    """A decode step, its batch, and the graph that sent it to the device."""

    graph: object
    step: DecodeStep
    batch: StepBatch


class LatestStep:
    """Records the last step that the graphs of one cache memory sent, if it was a decode step."""

    def __init__(self) -> None:
        self._sent: SentStep | None = None

    def note(self, sent: SentStep | None) -> None:
        """Store the step that was sent; pass None for a step with prefill."""
        self._sent = sent

    def of(self, graph: object) -> SentStep | None:
        """Return the stored step if this graph sent it, otherwise None."""
        return self._sent if self._sent is not None and self._sent.graph is graph else None


def send_again(
    last: DecodeStep, requests: Sequence[RunningRequest], buffers: StepBuffers, block_size: int, num_table_rows: int
) -> DecodeStep:
    """Update the buffers from step `last` to the next step of `requests`, send it, and return it.

    `last.continues` must be True for these requests.

    Args:
        num_table_rows: Number of block-table rows that the step uses, padding included.
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
    """Send and return the next one-token step before the host has read the last step's tokens.

    The caller must copy these tokens to the step's inputs on the device, see `StepBuffers.feed`.

    Args:
        num_table_rows: Number of block-table rows that the step uses, padding included.
    """
    num_requests, fold_len = len(last.requests), buffers.limits.fold_len
    buffers.begin()
    if fold_len:  # the last step may have folded up to a later position
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
    """Update block ids and boundary slots of requests whose last or next token starts or completes a KV block.

    Returns:
        True if any entry of the block table changed.
    """
    if not ((buffers.host("computed")[: len(requests)] + 1) % block_size < 3).any():
        return False
    has_new_blocks = _write_published_blocks(requests, buffers, block_size)
    has_new_blocks |= _write_begun_blocks(requests, buffers, block_size)
    _write_boundaries(requests, buffers, block_size)
    return has_new_blocks


def _write_published_blocks(requests: Sequence[RunningRequest], buffers: StepBuffers, block_size: int) -> bool:
    """Update the ids of blocks completed two steps ago, which publication may replace; return whether any changed.

    Publication replaces a request's block if another request has published a block with the same tokens first.
    """
    computed, table, is_new = buffers.host("computed")[: len(requests)], buffers.host_block_table(), False
    for row in np.flatnonzero(computed % block_size == 1).tolist():
        index = int(computed[row]) // block_size - 1
        if index >= 0 and table[row, index] != (block := requests[row].block_ids[index]):
            table[row, index], is_new = block, True
    return is_new


def _write_begun_blocks(requests: Sequence[RunningRequest], buffers: StepBuffers, block_size: int) -> bool:
    """Write the ids of the blocks that requests start to fill; return whether any request starts one."""
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
    """Write the reserved slots for the boundaries that requests reach with their next token."""
    ends = buffers.host("computed")[: len(requests)] + 1
    slots = buffers.host("align_slots")[: len(requests)]
    slots[:] = PAD_SLOT
    for row in np.flatnonzero(ends % block_size == 0).tolist():
        slots[row] = next((state.slot for state in requests[row].reserved if state.position == ends[row]), PAD_SLOT)


def _ends_of(requests: Sequence[RunningRequest]) -> RequestEnds | None:
    """Return the requests' end conditions if each has one token and no drafts; otherwise None."""
    decodes_one_each = all(
        request.scheduled == 1 and request.cursor.accepted == 1  # the next step needs the same values in the buffers
        for request in requests
    )
    return RequestEnds.of(requests) if decodes_one_each else None
