"""The batches of a step, as ops on states read them: packed tokens, and the slots of the requests' states."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PAD_SLOT = -1
"""Slot number of no slot: reads as the zero state, and writes to it are dropped."""


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Packed requests of a prefill, their chunks and their state slots; all tensors on the ops' device.

    Several requests may share an initial slot, and it may be a request's own final slot. Final and chunk slots are
    pairwise distinct and never another request's initial slot. Tokens past the last request are padding.

    Args:
        cu_seqlens: [requests + 1] int32; request r has the packed tokens [cu_seqlens[r], cu_seqlens[r + 1]).
        initial_slots: [requests] int32; slot of the state before the first token, PAD_SLOT for the zero state.
        final_slots: [requests] int32; slot that receives the state after the last token, PAD_SLOT for none. Without
            tokens it receives the initial state.
        cu_chunks: [chunks + 1] int32; packed starts of the chunks, in order, none across requests. An empty chunk is
            padding.
        chunk_requests: [chunks] int32; the request of each chunk.
        chunk_slots: [chunks] int32; slot that receives the state at the chunk's end, PAD_SLOT for none.
        cu_request_chunks: [requests + 1] int32; request r has the chunks [cu_request_chunks[r], cu_request_chunks[r +
            1]).
        longest_first: [requests] int32; the order in which to start their work.
    """

    cu_seqlens: Tensor
    initial_slots: Tensor
    final_slots: Tensor
    cu_chunks: Tensor
    chunk_requests: Tensor
    chunk_slots: Tensor
    cu_request_chunks: Tensor
    longest_first: Tensor


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Packed decode requests and their draft windows; all tensors on the ops' device.

    A request starts from the state that its last step accepted, and keeps the state after each of its tokens, so that
    any number of drafts may be rejected. The slot of column 0 also holds its conv window: of n tokens fed, the last
    d_conv - 2 + n inputs, oldest first. Requests have distinct slots. Tokens past the last request are padding.

    Args:
        cu_tokens: [requests + 1] int32; request r feeds the packed tokens [cu_tokens[r], cu_tokens[r + 1]).
        columns: [requests, columns] int32; column j's slot receives the state after token j, PAD_SLOT past the last
            one. PAD_SLOT in column 0 marks a padding request: its outputs are zeros, and it writes nothing.
        accepted: [requests] int32, at least 1; tokens that the last step kept. The state is in column accepted - 1, and
            the conv window begins at input accepted - 1.
        max_len: Host bound of the tokens of a request, at most the number of columns.
    """

    cu_tokens: Tensor
    columns: Tensor
    accepted: Tensor
    max_len: int


class DecodeView(NamedTuple):
    """A kernel's view of `DecodeBatch`."""

    cu_tokens: Tensor
    columns: Tensor
    accepted: Tensor


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """Packed decode requests whose states are replayed from a buffer each; all tensors on the ops' device.

    A request's slot holds its base, the state after `folded` tokens; its buffer holds the inputs of the tokens after
    them. Requests have distinct slots and buffers. Tokens past the last request are padding.

    Args:
        cu_tokens: [requests + 1] int32; request r feeds the packed tokens [cu_tokens[r], cu_tokens[r + 1]).
        slots: [requests] int32; slot of the base. PAD_SLOT marks a padding request, as in `DecodeBatch`.
        buffers: [requests] int32; index of the buffer.
        folded: [requests] int32; tokens that are in the base before the step.
        computed: [requests] int32; tokens before the step, at least `folded`: the position of the first token.
        max_tokens: Host bound of the tokens of a request.
    """

    cu_tokens: Tensor
    slots: Tensor
    buffers: Tensor
    folded: Tensor
    computed: Tensor
    max_tokens: int


@dataclass(frozen=True, slots=True)
class AlignBatch:
    """Inputs of a step's align copy; all tensors on the pools' device.

    A request copies at most one state. Targets are pairwise distinct and never another request's source. Where one is
    copied, state_columns + shift is one of the request's columns.

    Args:
        computed: [requests] int32; tokens before the step.
        scheduled: [requests] int32; tokens fed in the step, drafts included.
        drafts: [requests] int32.
        accepted: [requests] int32 or int64, of any stride; tokens kept, the base token included; 0 counts as 1.
        columns: [requests, columns] int32; slots of the draft window, PAD_SLOT for padding requests.
        state_columns: [requests] int32; column that holds the state after the base token.
        targets: [requests] int32; slot that receives the state at the one boundary that the step can reach, PAD_SLOT
            for none.
    """

    computed: Tensor
    scheduled: Tensor
    drafts: Tensor
    accepted: Tensor
    columns: Tensor
    state_columns: Tensor
    targets: Tensor


def full_sequences(num_requests: int, length: int, grain: int, device: torch.device) -> PrefillBatch:
    """Return the batch of a plain full-sequence forward: equal lengths, zero initial states, no state kept."""
    chunk_starts = torch.arange(0, length, grain, dtype=torch.int32, device=device)
    request_starts = torch.arange(0, (num_requests + 1) * length, length, dtype=torch.int32, device=device)
    starts = (request_starts[:-1, None] + chunk_starts).flatten()
    none = torch.full_like(request_starts[:-1], PAD_SLOT)
    numbers = torch.arange(num_requests, dtype=torch.int32, device=device)
    return PrefillBatch(
        cu_seqlens=request_starts,
        initial_slots=none,
        final_slots=none,
        cu_chunks=torch.cat((starts, request_starts[-1:])),
        chunk_requests=torch.arange(num_requests, dtype=torch.int32, device=device).repeat_interleave(
            len(chunk_starts)
        ),
        chunk_slots=torch.full_like(starts, PAD_SLOT),
        cu_request_chunks=torch.arange(num_requests + 1, dtype=torch.int32, device=device) * len(chunk_starts),
        longest_first=numbers,
    )


def check_decode_batch(rows: DecodeBatch, device: torch.device) -> None:
    """Raise a ValueError unless the tensors of a batch fit together and are on `device`."""
    num_requests = rows.accepted.shape[0]
    check_vectors({"cu_tokens": (rows.cu_tokens, num_requests + 1), "accepted": (rows.accepted, num_requests)}, device)
    columns = rows.columns
    if columns.dim() != 2 or columns.shape[0] != num_requests or not 1 <= rows.max_len <= columns.shape[1]:
        raise ValueError(
            f"need columns for {num_requests} requests and max_len from 1 to their number, "
            f"found {tuple(columns.shape)} and {rows.max_len}"
        )
    if columns.dtype != torch.int32 or columns.device != device or not columns[:1].is_contiguous():
        raise ValueError(
            f"need columns of int32 on {device}, contiguous for each request, "
            f"found {columns.dtype} on {columns.device} with strides {columns.stride()}"
        )


def check_prefill_batch(rows: PrefillBatch, device: torch.device) -> None:
    """Raise a ValueError unless the tensors of a batch fit together and are on `device`."""
    num_requests, num_chunks = rows.final_slots.shape[0], rows.chunk_requests.shape[0]
    vectors = {
        "cu_seqlens": (rows.cu_seqlens, num_requests + 1),
        "initial_slots": (rows.initial_slots, num_requests),
        "final_slots": (rows.final_slots, num_requests),
        "cu_chunks": (rows.cu_chunks, num_chunks + 1),
        "chunk_requests": (rows.chunk_requests, num_chunks),
        "chunk_slots": (rows.chunk_slots, num_chunks),
        "cu_request_chunks": (rows.cu_request_chunks, num_requests + 1),
        "longest_first": (rows.longest_first, num_requests),
    }
    check_vectors(vectors, device)


def check_vectors(vectors: dict[str, tuple[Tensor, int]], device: torch.device) -> None:
    """Raise a ValueError unless each tensor is a contiguous int32 vector of the given length, on `device`."""
    for name, (values, length) in vectors.items():
        if values.dtype != torch.int32 or values.device != device:
            raise ValueError(f"need {name} of int32 on {device}, found {values.dtype} on {values.device}")
        if tuple(values.shape) != (length,) or not values.is_contiguous():
            raise ValueError(
                f"need contiguous {name} of shape ({length},), "
                f"found {tuple(values.shape)} with strides {values.stride()}"
            )


class PackedTokens:
    """Convert between packed decode tokens and [requests, max_len], where `inside` marks real tokens, not padding."""

    def __init__(self, rows: DecodeBatch) -> None:
        starts, ends = rows.cu_tokens[:-1].to(torch.int64), rows.cu_tokens[1:].to(torch.int64)
        self._positions = starts[:, None] + torch.arange(rows.max_len, device=starts.device)
        self.inside = (self._positions < ends[:, None]) & (rows.columns[:, :1] != PAD_SLOT)

    def gather(self, packed: Tensor) -> Tensor:
        """Return [tokens, ...] as [requests, max_len, ...]; arbitrary tokens where `inside` is False."""
        positions = self._positions.clamp_max(packed.shape[0] - 1).flatten()
        return packed.index_select(0, positions).unflatten(0, self.inside.shape)

    def scatter(self, padded: Tensor, like: Tensor) -> Tensor:
        """Return [requests, max_len, ...] as packed tokens of the shape and dtype of `like`, zeros elsewhere."""
        num_tokens = like.shape[0]
        packed = like.new_zeros(num_tokens + 1, *like.shape[1:])  # the last one receives padding
        targets = torch.where(self.inside, self._positions, num_tokens).flatten()
        packed.index_copy_(0, targets, padded.flatten(0, 1).to(like.dtype))
        return packed[:num_tokens]
