"""Protocol for attention backends: chosen once per model, planned once per step, called once per layer."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .kv_values import FP8, UNSCALED, KVScales


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Query lengths, KV lengths and block table for the packed requests of a step.

    Args:
        cu_query: [requests + 1] int32; index of the first packed query token of each request.
        kv_lengths: [requests] int32; number of cached tokens, including this step's. If it is 0, the result is zeros.
        block_table: [requests, max_blocks] int32; entries after a request's last block are undefined.
        query_lens: Host copy of the query lengths.
        kv_lens: Host copy of `kv_lengths`, or upper bounds; tokens beyond `kv_lengths` are read but masked.
        host_block_table: Host copy of `block_table`; valid until the results of the step are read back.
        num_decode_requests: Number of leading requests that decode or verify drafts; all others are prompts.
        last_block_lens: [requests] int32; number of tokens in each request's last block, undefined if it has none.
            Graphs read it; None if no graph is captured.
    """

    cu_query: Tensor
    kv_lengths: Tensor
    block_table: Tensor
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    host_block_table: npt.NDArray[np.int32]
    num_decode_requests: int = 0
    last_block_lens: Tensor | None = None


class PlannedAttention(Protocol):
    """Protocol for the function that computes attention in each layer of a step."""

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales = UNSCALED, /) -> Tensor:
        """Compute attention in one layer; shapes and scales are as in `paged_attention_ref`."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Dimensions and dtypes shared by all attention layers of a model on this rank.

    Args:
        num_heads: Number of query heads; a multiple of num_kv_heads.
        block_size: Number of tokens per KV block.
        scale: Factor for the scores before softmax.
        dtype: Dtype of queries, new keys and values, and results.
        num_blocks: Number of KV blocks in one layer's cache; 0: unknown.
        block_stride_bytes: Stride of these blocks in bytes, including other layers' data between them; 0: unknown.
        has_fp8_kv: True if keys and values are cached as FP8 codes.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    num_blocks: int = 0
    block_stride_bytes: int = 0
    has_fp8_kv: bool = False

    @property
    def kv_dtype(self) -> torch.dtype:
        """Dtype of cached keys and values."""
        return FP8 if self.has_fp8_kv else self.dtype


class CapturedAttention(Protocol):
    """Protocol for attention in CUDA graphs of one shape: captured once, planned again before each replay."""

    @property
    def last_block(self) -> int | None:
        """The highest KV block id that prompts may use; None: no limit."""

    @property
    def is_planned(self) -> bool:
        """True if `plan_again` must be called before each replay; if False, it does nothing."""

    def begin(self) -> PlannedAttention:
        """Return the function that computes attention in each layer; called while the graph is captured."""

    def plan_again(self, rows: AttentionRows) -> None:
        """Prepare the next replay for `rows`, which must have as many requests as captured, none of them longer.

        Called outside of graphs. The plan stays valid while only KV lengths grow: query lengths and blocks must not
        change.
        """


class AttentionBackend(Protocol):
    """Protocol for attention backends; up to rounding, their results equal those of `paged_attention_ref`."""

    name: str
    setting: str
    """Value of `CacheConfig.attention_backend` that selects the backend."""

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Plan a step's attention from its host lengths and block table; the next call invalidates the result."""

    def capture(self, rows: AttentionRows, *, may_be_left_out: bool = False) -> CapturedAttention:
        """Return the attention to capture in a CUDA graph; replays read the tensors in `rows`.

        In a replay, no request may be longer than in `rows`.

        Args:
            may_be_left_out: True if a step whose prompts use blocks after `last_block` may run eagerly instead.
        """


class DeviceLengths:
    """`CapturedAttention` for a backend that reads the exact lengths on the device and needs no plan."""

    is_planned = False
    last_block = None

    def __init__(self, backend: AttentionBackend, rows: AttentionRows) -> None:
        self._backend = backend
        self._rows = rows

    def begin(self) -> PlannedAttention:
        """Return attention for requests of the maximum lengths; the lengths on the device mask excess tokens."""
        return self._backend.plan(self._rows)

    def plan_again(self, rows: AttentionRows) -> None:
        """Do nothing: replays read the lengths on the device."""


def attend_rows(q: Tensor, num_tokens: int, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `attend` to the first `num_tokens` tokens of `q`; return zeros for the padding tokens."""
    if 0 < num_tokens == q.shape[0]:
        return attend(q)
    out = torch.zeros_like(q)
    if num_tokens:
        out[:num_tokens] = attend(q[:num_tokens])
    return out


def attention_after(first: Callable[[], None], attend: PlannedAttention) -> PlannedAttention:
    """Return an attention function that calls `first` once, before the first layer's attention."""
    is_called = False

    def attend_after(q: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales = UNSCALED, /) -> Tensor:
        nonlocal is_called
        if not is_called:
            first()
            is_called = True
        return attend(q, k_cache, v_cache, scales)

    return attend_after


def is_installed(package: str) -> bool:
    """Return True if a package is installed; the package is not imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def half_precision_refusal(shape: AttentionShape, head_dims: tuple[int, ...] | range) -> str | None:
    """Return why half-precision GPU kernels do not support the model, or None if they do."""
    if shape.device.type != "cuda":
        return f"it needs a CUDA device, found {shape.device.type}"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs bfloat16 or float16, but the model uses {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in head_dims:
        allowed = f"a multiple of 8 up to {head_dims[-1]}" if isinstance(head_dims, range) else f"one of {head_dims}"
        return f"the number of channels per head must be {allowed}, found {shape.head_dim}"
    if torch.cuda.get_device_capability(shape.device) < (8, 0):
        return "it needs a GPU with compute capability 8.0 or higher"
    return None
