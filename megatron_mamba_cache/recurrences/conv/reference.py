"""Torch references for the causal depthwise convolution, for prefill and for decode steps with drafts."""

import torch
from torch import Tensor

from ...kernels.reference import compute_dtype
from ..batches import PAD_SLOT, DecodeBatch, PackedTokens, PrefillBatch
from ..draft_inputs import DraftInputs, windows_with_drafts
from ..slot_copies import load_slots, store_slots


def causal_conv_ref(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, rows: PrefillBatch, ends: Tensor | None = None
) -> Tensor:
    """Torch reference for `causal_conv`; all initial windows are read before any window is written."""
    num_tokens, num_rows, d_conv = x.shape[0], rows.initial_slots.shape[0], weight.shape[1]
    if num_rows == 0:
        return torch.zeros_like(x)
    pool = conv_pool[:, : d_conv - 1]
    windows = load_slots(pool, rows.initial_slots, compute_dtype(x))  # [requests, d_conv - 1, conv_dim]
    inputs = _RawInputs(x, windows, rows)

    tokens = torch.arange(num_tokens, device=x.device)
    row_ends = rows.cu_seqlens[1:].to(torch.int64)
    owner = torch.searchsorted(row_ends, tokens, right=True).clamp_max(num_rows - 1)  # [tokens]
    history = [inputs.at(tokens - lag, owner) for lag in range(d_conv - 1, -1, -1)]
    y = _weigh_and_activate(history, weight, bias)
    y = torch.where((tokens < row_ends[-1])[:, None], y, 0).to(x.dtype)

    _store_windows(pool, pool if ends is None else ends[:, : d_conv - 1], inputs, rows)
    return y


def conv_verify_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_pool: Tensor,
    rows: DecodeBatch,
    *,
    drafts: DraftInputs | None = None,
) -> Tensor:
    """Torch reference for `conv_verify`."""
    window_len, dtype = weight.shape[1] - 1, compute_dtype(x)
    tokens = PackedTokens(rows)
    inputs = tokens.gather(x).to(dtype)  # [requests, max_len, conv_dim]
    live, lengths = rows.columns[:, 0], rows.cu_tokens[1:] - rows.cu_tokens[:-1]
    offsets = (rows.accepted - 1).to(torch.int64)[:, None] + torch.arange(window_len, device=x.device)
    stored = load_slots(conv_pool if drafts is None else conv_pool[:, :window_len], live, conv_pool.dtype)
    stored = windows_with_drafts(stored, drafts, live != PAD_SLOT)
    window = stored.to(dtype).gather(1, offsets[:, :, None].expand(-1, -1, x.shape[1]))
    # Inputs from earlier steps were rounded to the pool's dtype, so round the inputs of this step too.
    history = torch.cat([window, inputs.to(conv_pool.dtype).to(dtype)], dim=1)  # [requests, window + max_len, conv_dim]
    taps = [history[:, tap : tap + rows.max_len] for tap in range(window_len)]
    y = _weigh_and_activate([*taps, inputs], weight, bias)
    kept = history[:, 1:].to(conv_pool.dtype)
    positions = torch.arange(kept.shape[1], device=x.device)
    num_kept = torch.where(lengths > 0, window_len - 1 + lengths, 0)
    kept = torch.where((positions < num_kept[:, None])[:, :, None], kept, stored[:, : kept.shape[1]])
    in_slot = kept.shape[1] if drafts is None else min(window_len, kept.shape[1])
    store_slots(conv_pool[:, :in_slot], live, kept[:, :in_slot])
    if drafts is not None:
        rings = torch.where(live != PAD_SLOT, drafts.buffers, PAD_SLOT)
        store_slots(drafts.inputs[:, : kept.shape[1] - in_slot], rings, kept[:, in_slot:])
    return tokens.scatter(y, x)


class _RawInputs:
    """Inputs of the convolution for each request: its initial window, followed by its tokens."""

    def __init__(self, x: Tensor, windows: Tensor, rows: PrefillBatch) -> None:
        self._x = x if x.shape[0] else x.new_zeros(1, x.shape[1])  # index_select needs at least one token
        self._windows = windows.flatten(0, 1)  # [requests * (d_conv - 1), conv_dim]
        self._window_len = windows.shape[1]
        self._row_starts = rows.cu_seqlens[:-1].to(torch.int64)

    def at(self, positions: Tensor, owner: Tensor) -> Tensor:
        """Return the inputs [n, conv_dim] at packed `positions` [n]; before a request's start, those of its window."""
        tokens = self._x.index_select(0, positions.clamp(0, self._x.shape[0] - 1)).to(self._windows.dtype)
        if self._window_len == 0:
            return tokens
        in_row = positions - self._row_starts.index_select(0, owner)
        in_window = (self._window_len + in_row).clamp(0, self._window_len - 1)
        carried = self._windows.index_select(0, owner * self._window_len + in_window)
        return torch.where((in_row >= 0)[:, None], tokens, carried)


def _weigh_and_activate(history: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return SiLU(sum of history[k] * weight[:, k] + bias), adding the oldest input first."""
    weight = weight.to(history[0].dtype)
    total = history[0] * weight[:, 0]
    for tap in range(1, len(history)):
        total = total + history[tap] * weight[:, tap]
    if bias is not None:
        total = total + bias.to(total.dtype)
    # On a CPU, torch's silu and sigmoid round the last few elements of a tensor differently, so a token's result would
    # depend on the number of tokens; exp, addition and division do not have this problem.
    return total / (1 + torch.exp(-total))


def _store_windows(pool: Tensor, of_chunks: Tensor, inputs: _RawInputs, rows: PrefillBatch) -> None:
    window_len, device = pool.shape[1], pool.device
    if window_len == 0:
        return
    cu_chunks = rows.cu_chunks
    chunk_slots = torch.where(cu_chunks[1:] > cu_chunks[:-1], rows.chunk_slots, PAD_SLOT)
    owner = torch.cat([torch.arange(rows.final_slots.shape[0], device=device), rows.chunk_requests.to(torch.int64)])
    ends = torch.cat([rows.cu_seqlens[1:], cu_chunks[1:]]).to(torch.int64)
    positions = ends[:, None] - window_len + torch.arange(window_len, device=device)
    windows = inputs.at(positions.flatten(), owner.repeat_interleave(window_len)).unflatten(0, (-1, window_len))
    num_rows = rows.final_slots.shape[0]
    store_slots(pool, rows.final_slots, windows[:num_rows])
    store_slots(of_chunks, chunk_slots, windows[num_rows:])
