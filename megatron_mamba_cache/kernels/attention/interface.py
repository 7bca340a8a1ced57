"""The attention backend protocol: chosen once for a model, planned once per step, called once per layer."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Packed query tokens of a step's requests, and their cached tokens.

    Args:
        cu_query: [requests + 1] int32; first packed query token of each request.
        kv_lengths: [requests] int32; cached tokens, this step's included. 0 gives zeros.
        block_table: [requests, max_blocks] int32; entries past a request's last block may hold anything.
        query_lens: Host copy of the query lengths.
        kv_lens: Host copy of `kv_lengths`, or upper bounds of it: they size the reads, `kv_lengths` masks them.
        host_block_table: Host copy of `block_table`, valid until the step's results have been read back.
        num_decode_requests: The first requests decode or verify; the others prefill.
        last_block_lens: [requests] int32; tokens in each last block, undefined without tokens. Read by graphs; None if
            nothing is captured.
    """

    cu_query: Tensor
    kv_lengths: Tensor
    block_table: Tensor
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    host_block_table: npt.NDArray[np.int32]
    num_decode_requests: int = 0
    last_block_lens: Tensor | None = None


PlannedAttention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attend one layer of a planned step: (q, k_cache, v_cache), shaped as for `paged_attention_ref`, to its result."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes that all attention layers of a model share on this rank.

    Args:
        num_heads: Query heads, a multiple of num_kv_heads.
        block_size: Tokens of a KV block.
        scale: Factor on the scores, before softmax.
        dtype: Dtype of queries, keys, values and results.
        num_blocks: KV blocks of a layer's cache, and
        block_bytes_apart: their stride in bytes, as other layers and states may be in between; 0: unknown.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    num_blocks: int = 0
    block_bytes_apart: int = 0


class CapturedAttention(Protocol):
    """Attention inside CUDA graphs of one shape: the same call, planned again before each replay."""

    @property
    def last_block(self) -> int | None:
        """The last KV block that it can read for prompts; None for all."""

    @property
    def is_planned(self) -> bool:
        """False if `plan_again` does nothing."""

    def begin(self) -> PlannedAttention:
        """Return the attention call for each layer; called during graph capture, which records the launches."""

    def plan_again(self, rows: AttentionRows) -> None:
        """Prepare the next replay, outside of any graph: the same number of requests, none longer than captured.

        The plan stays valid as requests grow, with the same query tokens and blocks.
        """


class AttentionBackend(Protocol):
    """Computes `paged_attention_ref`, up to the rounding of its dtype; built for one `AttentionShape`."""

    name: str
    setting: str
    """Its value of `CacheConfig.attention_backend`."""

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Plan the calls of a step's layers from its host lengths and block table; valid until the next plan."""

    def capture(self, rows: AttentionRows, *, may_be_left_out: bool = False) -> CapturedAttention:
        """Prepare graphs for requests at most as long as these; replays read the same tensors.

        Args:
            may_be_left_out: True if steps with prompts in blocks beyond `last_block` run without these graphs.
        """


class DeviceLengths:
    """`CapturedAttention` of a backend that reads exact lengths on the device: no plan is needed."""

    is_planned = False
    last_block = None

    def __init__(self, backend: AttentionBackend, rows: AttentionRows) -> None:
        self._backend = backend
        self._rows = rows

    def begin(self) -> PlannedAttention:
        """Return the attention call for each layer, for the longest rows."""
        return self._backend.plan(self._rows)

    def plan_again(self, rows: AttentionRows) -> None:
        """Do nothing."""


def attend_rows(q: Tensor, num_tokens: int, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `attend` of the first `num_tokens` tokens of q, and zeros for padding."""
    if 0 < num_tokens == q.shape[0]:
        return attend(q)
    out = torch.zeros_like(q)
    if num_tokens:
        out[:num_tokens] = attend(q[:num_tokens])
    return out


def attention_after(first: Callable[[], None], attend: PlannedAttention) -> PlannedAttention:
    """Return the attention of a step that calls `first` once, before its first layer."""
    is_called = False

    def attend_after(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        nonlocal is_called
        if not is_called:
            first()
            is_called = True
        return attend(q, k_cache, v_cache)

    return attend_after


def is_installed(package: str) -> bool:
    """Return True if a package can be found; it is not imported."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def half_precision_refusal(shape: AttentionShape, head_dims: tuple[int, ...] | range) -> str | None:
    """Return why no half-precision kernel can serve a model; None if one can."""
    if shape.device.type != "cuda":
        return f"it needs a CUDA device, found {shape.device.type}"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs bfloat16 or float16, the model is {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in head_dims:
        allowed = f"a multiple of 8 up to {head_dims[-1]}" if isinstance(head_dims, range) else f"one of {head_dims}"
        return f"it needs {allowed} channels a head, the model has {shape.head_dim}"
    if torch.cuda.get_device_capability(shape.device) < (8, 0):
        return "it needs compute capability 8.0 or higher"
    return None
