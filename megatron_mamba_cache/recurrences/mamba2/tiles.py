"""Split requests into tiles and heads into slices for the SSD scan, and sum the decays of the tokens in each tile.

Grid: one program per tile number (see `request_tiles`) and group of heads. Safe in CUDA graphs: no host sync, and the
grid depends only on the number of chunks.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.overlap import await_then_release, overlapping
from ..batches import PAD_SLOT, PrefillBatch
from ..request_tiles import TileShape, cut_view, find_tile
from .inputs import SSMWeights, time_step

_HEADS_AT_A_TIME = 8
_PAD = tl.constexpr(PAD_SLOT)
_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Channels of each head that one launch scans: `width`, a power of two, starting at `first`."""

    first: int
    width: int


def head_slices(head_dim: int) -> list[HeadSlice]:
    """Split head_dim, a multiple of 16, into power-of-two slices, widest first: 80 becomes 64 and 16."""
    slices, first = [], 0
    for width in (1 << bit for bit in reversed(range(head_dim.bit_length()))):
        if head_dim & width:
            slices.append(HeadSlice(first, width))
            first += width
    return slices


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """Tile sizes of the Hopper scan kernel; they do not affect the result.

    Args:
        heads: Number of heads per program, 1 or 2; two heads must be in one group and share its tiles of B and C.
        channels: Number of channels per head in a program; a power of two, at least 16.
        num_stages: Number of pipeline stages, at least 2.
    """

    heads: int
    channels: int
    num_stages: int

    def within(self, width: int) -> "HopperTiling":
        """Return this tiling with `channels` limited to the width of a slice."""
        return replace(self, channels=min(self.channels, width))


@dataclass(frozen=True, slots=True)
class ScanTiles:
    """Tiles of a batch, with decays and output buffer.

    Args:
        decays: [heads, tiles, 2, width] float32. For each token: log2 of the decay from the start of the tile up to and
            including the token, and log2 of its time step (gain). For bf16 tokens, the decay is already subtracted from
            the gain, which saves work in the scan; for float32 tokens that would lose accuracy. Tokens outside the
            request have decay 1 and time step 0.
        slots: [tiles] int32; slot that receives the state at the end of the tile; PAD_SLOT: do not store it.
        y: [tokens, heads, head_dim]; the scan writes its outputs here; zeros after the last request.
    """

    shape: TileShape
    decays: Tensor
    slots: Tensor
    y: Tensor

    @property
    def num_bytes(self) -> int:
        """Size in bytes of all tensors except `y`."""
        return self.decays.nbytes + self.slots.nbytes

    @staticmethod
    def empty(dt: Tensor, shape: TileShape, num_tiles: int, head_dim: int, dtype: torch.dtype) -> "ScanTiles":
        """Allocate the tensors without initializing them; arguments as in `cut_tiles`."""
        (num_tokens, num_heads), device = dt.shape, dt.device
        return ScanTiles(
            shape,
            decays=torch.empty(num_heads, num_tiles, 2, shape.width, dtype=torch.float32, device=device),
            slots=torch.empty(num_tiles, dtype=torch.int32, device=device),
            y=torch.empty(num_tokens, num_heads, head_dim, dtype=dtype, device=device),
        )


@triton.jit(do_not_specialize=["dt_stride", "num_tiles", "num_rows", "num_tokens"])
def _tiles_kernel(
    dt, A_log, dt_bias, rows, decays, slots, y, dt_stride, least_step, most_step, num_tiles, num_rows, num_tokens,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, PER_CHUNK: tl.constexpr,
    HEADS_AT_A_TIME: tl.constexpr, LANES: tl.constexpr, SUBTRACTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_then_release(OVERLAPS)
    tile = tl.program_id(0)
    head = tl.program_id(1) * HEADS_AT_A_TIME + tl.arange(0, HEADS_AT_A_TIME)
    has_head = head < HEADS

    lane = tl.arange(0, LANES)
    channel = (tl.program_id(1) * HEADS_AT_A_TIME * HEAD_DIM).to(tl.int64) + lane
    cleared = (lane < HEADS_AT_A_TIME * HEAD_DIM) & (channel < HEADS * HEAD_DIM)
    for token in range(tl.load(rows.cu_seqlens + num_rows) + tile, num_tokens, num_tiles):  # zero padding
        tl.store(y + tl.cast(token, tl.int64) * (HEADS * HEAD_DIM) + channel, 0.0, mask=cleared)

    chunk = tile // PER_CHUNK
    start = tl.load(rows.cu_chunks + chunk)
    end = tl.load(rows.cu_chunks + chunk + 1)
    in_chunk = (end - start + LENGTH - 1) // LENGTH
    number, begin = find_tile(rows, tile, start, end, in_chunk, LENGTH, PER_CHUNK)
    if (number < 0) | (number >= in_chunk):
        return
    if tl.program_id(1) == 0:
        tl.store(slots + tile, tl.load(rows.chunk_slots + chunk, mask=number == in_chunk - 1, other=_PAD))

    token = begin + tl.arange(0, WIDTH)
    inside = (token >= start) & (token < tl.minimum(end, begin + LENGTH))
    step = tl.load(
        dt + token[:, None].to(tl.int64) * dt_stride + head[None, :],
        mask=inside[:, None] & has_head[None, :],
        other=0.0,
    )
    bias = tl.load(dt_bias + head, mask=has_head, other=0.0)
    step = time_step(step, bias[None, :], least_step, most_step)
    step = tl.where(inside[:, None], step, 0.0)  # [WIDTH, HEADS_AT_A_TIME]
    rate = -tl.exp(tl.load(A_log + head, mask=has_head, other=0.0).to(tl.float32)) * _LOG2_E
    decay = tl.cumsum(step * rate[None, :], axis=0)
    gain = tl.where(step > 0, tl.log2(tl.where(step > 0, step, 1.0)), float("-inf"))
    if SUBTRACTS:
        gain -= decay
    index = (head[None, :].to(tl.int64) * num_tiles + tile) * (2 * WIDTH) + tl.arange(0, WIDTH)[:, None]
    tl.store(decays + index, decay, mask=has_head[None, :])
    tl.store(decays + index + WIDTH, gain, mask=has_head[None, :])


def cut_tiles(
    dt: Tensor, weights: SSMWeights, rows: PrefillBatch, shape: TileShape, head_dim: int, dtype: torch.dtype
) -> ScanTiles:
    """Split requests into tiles, sum the decays, and zero the outputs of padding tokens.

    The next kernel may read anything but these results immediately (`await_then_release`).

    Args:
        dt: [tokens, heads], as in `SSMTokens`.
        rows: The batch; must contain at least one chunk.
        dtype: Dtype of the scanned tokens and of the outputs.
    """
    num_tokens, num_heads = dt.shape
    num_tiles = rows.chunk_requests.shape[0] * shape.per_chunk
    tiles = ScanTiles.empty(dt, shape, num_tiles, head_dim, dtype)
    least_step, most_step = weights.dt_limit
    _tiles_kernel[(num_tiles, triton.cdiv(num_heads, _HEADS_AT_A_TIME))](
        dt=dt,
        A_log=weights.A_log,
        dt_bias=weights.dt_bias,
        rows=cut_view(rows),
        decays=tiles.decays,
        slots=tiles.slots,
        y=tiles.y,
        dt_stride=dt.stride(0),
        least_step=least_step,
        most_step=most_step,
        num_tiles=num_tiles,
        num_rows=rows.cu_seqlens.shape[0] - 1,
        num_tokens=num_tokens,
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        LENGTH=shape.length,
        WIDTH=shape.width,
        PER_CHUNK=shape.per_chunk,
        HEADS_AT_A_TIME=_HEADS_AT_A_TIME,
        LANES=triton.next_power_of_2(_HEADS_AT_A_TIME * head_dim),
        SUBTRACTS=dtype == torch.bfloat16,
        enable_fp_fusion=True,
        **overlapping(dt.device),
    )
    return tiles
