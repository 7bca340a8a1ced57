"""Batch arguments for the ops on states: packed tokens, and the state slots of the requests."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PAD_SLOT = -1
"""Slot number that stands for no slot: it reads as the zero state, and writes to it are dropped."""


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Packed prefill requests, their chunks and their state slots; all tensors are on the device of the states.

    Requests may share an initial slot, and a request's final slot may equal its initial slot. Otherwise final and chunk
    slots are distinct, and none is the initial slot of another request. Tokens after the last request are padding.

    Args:
        cu_seqlens: [requests + 1] int32; request r has the packed tokens cu_seqlens[r] to cu_seqlens[r + 1] - 1.
        initial_slots: [requests] int32; slot of the state before the first token; PAD_SLOT: the zero state.
        final_slots: [requests] int32; slot that receives the state after the last token, or the initial state if the
            request has no tokens; PAD_SLOT: do not store it.
        cu_chunks: [chunks + 1] int32; packed start of each chunk, in order. No chunk spans two requests. An empty chunk
            is padding.
        chunk_requests: [chunks] int32; index of each chunk's request.
        chunk_slots: [chunks] int32; slot that receives the state at the end of the chunk; PAD_SLOT: do not store it.
        cu_request_chunks: [requests + 1] int32; request r has chunks cu_request_chunks[r] to
            cu_request_chunks[r + 1] - 1.
        longest_first: [requests] int32; indices of the requests, longest first: the order in which kernels start them.
        computed: [requests] int32; number of tokens before the batch. Only stochastic rounding needs it, and None is
            allowed without.
        block_size: Number of tokens between the positions at which stochastic rounding rounds states within a request;
            a multiple of the chunk size.
    """

    cu_seqlens: Tensor
    initial_slots: Tensor
    final_slots: Tensor
    cu_chunks: Tensor
    chunk_requests: Tensor
    chunk_slots: Tensor
    cu_request_chunks: Tensor
    longest_first: Tensor
    computed: Tensor | None = None
    block_size: int = 0


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Packed decode requests and their draft windows; all tensors are on the device of the states.

    A draft window is a row of slots, one per token of a step. It stores the state after each token, so any number of
    drafts can be rejected. The next step starts from the state after the last accepted token. The slot in column 0 also
    holds the conv window: after a step of n tokens, the last d_conv - 2 + n inputs, oldest first. All slots are
    distinct. Tokens after the last request are padding.

    Args:
        cu_tokens: [requests + 1] int32; request r has the packed tokens cu_tokens[r] to cu_tokens[r + 1] - 1.
        columns: [requests, columns] int32; the slot in column j receives the state after token j; PAD_SLOT after the
            last token. PAD_SLOT in column 0 marks padding, whose outputs are zeros and which writes nothing.
        accepted: [requests] int32, at least 1; number of tokens accepted in the last step. The state after them is in
            column accepted - 1, and the conv window begins at input accepted - 1.
        max_len: Upper bound on the host for the number of tokens per request; at most the number of columns.
        computed: As in `PrefillBatch`.
    """

    cu_tokens: Tensor
    columns: Tensor
    accepted: Tensor
    max_len: int
    computed: Tensor | None = None


class DecodeView(NamedTuple):
    """The tensors of a `DecodeBatch` as kernel arguments."""

    cu_tokens: Tensor
    columns: Tensor
    accepted: Tensor


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """Packed decode requests whose states are recomputed from buffered inputs; all tensors are on the states' device.

    A request's slot holds its base: the state after its first `folded` tokens. Its buffer holds the inputs of the
    following tokens. Slots and buffers are distinct. Tokens after the last request are padding.

    Args:
        cu_tokens: [requests + 1] int32; request r has the packed tokens cu_tokens[r] to cu_tokens[r + 1] - 1.
        slots: [requests] int32; slot of the base. PAD_SLOT marks padding, as in `DecodeBatch`.
        buffers: [requests] int32; index of each request's buffer.
        folded: [requests] int32; number of tokens included in the base before the step.
        computed: [requests] int32, at least `folded`; number of tokens before the step, and so the position of its
            first token.
        max_tokens: Upper bound on the host for the number of tokens per request.
    """

    cu_tokens: Tensor
    slots: Tensor
    buffers: Tensor
    folded: Tensor
    computed: Tensor
    max_tokens: int


@dataclass(frozen=True, slots=True)
class AlignBatch:
    """Batch for the align copy, which caches states at block boundaries; all tensors are on the device of the pools.

    At most one state per request is copied. Targets are distinct, and no target is another request's source. The source
    is in column `state_columns` + shift, where shift is the number of accepted drafts before the boundary; a request
    whose state is copied must have this column.

    Args:
        computed: [requests] int32; number of tokens before the step.
        scheduled: [requests] int32; number of tokens processed in the step, including drafts.
        drafts: [requests] int32; number of drafts in the step.
        accepted: [requests] int32 or int64, any stride; number of accepted tokens, including the base token; 0 counts
            as 1.
        columns: [requests, columns] int32; slots of the draft window; PAD_SLOT for padding.
        state_columns: [requests] int32; column that holds the state after the base token.
        targets: [requests] int32; slot to copy the state to if the step reaches a block boundary (it can reach at most
            one); PAD_SLOT: do not copy.
    """

    computed: Tensor
    scheduled: Tensor
    drafts: Tensor
    accepted: Tensor
    columns: Tensor
    state_columns: Tensor
    targets: Tensor


def full_sequences(num_requests: int, length: int, grain: int, device: torch.device) -> PrefillBatch:
    """Return a batch of equally long sequences that start from zero states and store no states."""
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
    """Raise a `ValueError` unless the tensors of the batch match each other and are on `device`."""
    num_requests = rows.accepted.shape[0]
    vectors = {"cu_tokens": (rows.cu_tokens, num_requests + 1), "accepted": (rows.accepted, num_requests)}
    check_vectors(vectors | _of_computed(rows, num_requests), device)
    columns = rows.columns
    if columns.dim() != 2 or columns.shape[0] != num_requests or not 1 <= rows.max_len <= columns.shape[1]:
        raise ValueError(
            f"columns must have shape [{num_requests}, columns] and max_len be between 1 and the number of columns, "
            f"found columns {tuple(columns.shape)} and max_len {rows.max_len}"
        )
    if columns.dtype != torch.int32 or columns.device != device or not columns[:1].is_contiguous():
        raise ValueError(
            f"columns must be int32 on {device} and contiguous for each request, "
            f"found {columns.dtype} on {columns.device} with strides {columns.stride()}"
        )


def check_prefill_batch(rows: PrefillBatch, device: torch.device) -> None:
    """Raise a `ValueError` unless the tensors of the batch match each other and are on `device`."""
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
    check_vectors(vectors | _of_computed(rows, num_requests), device)


def _of_computed(rows: PrefillBatch | DecodeBatch, num_requests: int) -> dict[str, tuple[Tensor, int]]:
    return {} if rows.computed is None else {"computed": (rows.computed, num_requests)}


def check_vectors(vectors: dict[str, tuple[Tensor, int]], device: torch.device) -> None:
    """Raise a `ValueError` unless each tensor is a contiguous int32 vector of the given length on `device`."""
    for name, (values, length) in vectors.items():
        if values.dtype != torch.int32 or values.device != device:
            raise ValueError(f"{name} must be int32 on {device}, found {values.dtype} on {values.device}")
        if tuple(values.shape) != (length,) or not values.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous with shape ({length},), "
                f"found {tuple(values.shape)} with strides {values.stride()}"
            )


class PackedTokens:
    """Conversion between packed tokens and a padded tensor [requests, max_len]; `inside` marks the real tokens."""

    def __init__(self, rows: DecodeBatch) -> None:
        starts, ends = rows.cu_tokens[:-1].to(torch.int64), rows.cu_tokens[1:].to(torch.int64)
        self._positions = starts[:, None] + torch.arange(rows.max_len, device=starts.device)
        self.inside = (self._positions < ends[:, None]) & (rows.columns[:, :1] != PAD_SLOT)

    def gather(self, packed: Tensor) -> Tensor:
        """Convert packed tokens [tokens, ...] to [requests, max_len, ...]; values outside `inside` are arbitrary."""
        positions = self._positions.clamp_max(packed.shape[0] - 1).flatten()
        return packed.index_select(0, positions).unflatten(0, self.inside.shape)

    def scatter(self, padded: Tensor, like: Tensor) -> Tensor:
        """Convert [requests, max_len, ...] to packed tokens in the shape and dtype of `like`; padding becomes zeros."""
        num_tokens = like.shape[0]
        packed = like.new_zeros(num_tokens + 1, *like.shape[1:])  # the additional last token receives padding
        targets = torch.where(self.inside, self._positions, num_tokens).flatten()
        packed.index_copy_(0, targets, padded.flatten(0, 1).to(like.dtype))
        return packed[:num_tokens]
