"""Fixed-address device buffer with all inputs of a step, which are copied from the host in one transfer.

Kernels and captured graphs read views with fixed addresses. The host writes a buffer with the same layout, in pinned
memory if the device is a GPU. The block table is the last section, so that a step copies only the rows that it uses.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.sampling.followed_steps import FollowedRows

FOLLOWED_UNIFORMS = "uniforms", "accept_uniforms"
"""Sections of `FollowedRows.uniforms` and `later_uniforms`; no draft of a step that follows has a distribution."""


class HostCopy:
    """Asynchronous copy of a tensor to the host; the device may overwrite the tensor afterwards."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", copy=True, non_blocking=True)  # into pinned memory
        self._arrival = torch.cuda.Event() if tensor.is_cuda else None
        if self._arrival is not None:
            self._arrival.record(stream_of(tensor))

    @property
    def is_of_gpu(self) -> bool:
        """True if the tensor is on a GPU, so the copy is asynchronous."""
        return self._arrival is not None

    def wait(self) -> list[list[int]]:
        """Wait for the copy of a 2D integer tensor; return it as a list of rows."""
        lines: list[list[int]] = self.arrived().tolist()
        return lines

    def arrived(self) -> Tensor:
        """Wait for the copy, and return the host tensor."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy


def stream_of(tensor: Tensor) -> torch.cuda.Stream:
    """Return the current stream of a CUDA tensor's device, looked up by device index because that is fastest."""
    return torch.cuda.current_stream(tensor.get_device())


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Maximum sizes of a step, from which its buffers are allocated.

    Args:
        max_chunks: Maximum number of chunks of all prefill requests together.
        max_blocks: Maximum number of KV blocks per request.
        max_drafts: Maximum number of draft tokens per request.
        max_length: Maximum number of tokens per request; 0 if only `max_blocks` limits it.
        marks_real_tokens: True if the model needs to know which tokens are not padding.
        has_quantized_weights: True if some weights stay quantized.
        has_fp8_kv: True if keys and values are cached as FP8 codes.
        fold_len: Number of tokens after which a draft buffer is folded into the state; 0 without draft buffers.
        restores_states: True if cached states are copied into live slots before a step's forward pass.
        block_size: Number of tokens per KV block.
    """

    max_tokens: int
    max_requests: int
    max_chunks: int
    max_blocks: int
    max_drafts: int = 0
    max_length: int = 0
    marks_real_tokens: bool = False
    has_quantized_weights: bool = False
    has_fp8_kv: bool = False
    fold_len: int = 0
    restores_states: bool = False
    block_size: int = 0

    @property
    def max_logits(self) -> int:
        """Maximum number of logits rows: one for each request's last token and one for each draft."""
        return min(self.max_tokens, self.max_requests * (1 + self.max_drafts))


class StepBuffers:
    """Host buffer and device buffer with the same int32 sections, in the order of `SECTIONS`.

    64-bit integers and floats are stored bitwise in int32 words. `StepBatch` documents the sections.
    """

    SECTIONS = (
        *("uniforms", "accept_uniforms", "residual_uniforms", "token_ids", "token_positions"),
        *("token_blocks", "token_offsets", "real_tokens", "cu_query", "kv_lengths", "last_block_lens"),
        *("cu_logits", "logit_tokens", "logit_requests", "computed", "scheduled", "num_drafts", "accepted"),
        *("columns", "state_columns", "align_slots", "live_slots", "draft_buffers", "folded"),
        *("temperature", "top_k", "top_p"),
        *("cu_seqlens", "prefill_computed", "initial_slots", "source_slots", "final_slots"),
        *("cu_chunks", "chunk_requests", "chunk_slots", "cu_request_chunks", "longest_first"),
        "block_table",
    )

    def __init__(self, limits: StepLimits, device: torch.device | int | str) -> None:
        self.limits = limits
        sizes = self._section_sizes(limits)
        ends = np.cumsum([sizes[name] for name in self.SECTIONS])
        self._spans = {
            name: slice(int(end) - sizes[name], int(end)) for name, end in zip(self.SECTIONS, ends, strict=True)
        }
        pinned = torch.device(device).type == "cuda"
        self._host = torch.zeros(int(ends[-1]), dtype=torch.int32, pin_memory=pinned)
        self._host_array = self._host.numpy()
        self._device = torch.zeros(int(ends[-1]), dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if pinned else None
        self.num_begun = 0

    @staticmethod
    def _section_sizes(limits: StepLimits) -> dict[str, int]:
        sizes = {name: limits.max_requests for name in StepBuffers.SECTIONS}
        sizes["token_ids"] = sizes["token_positions"] = 2 * limits.max_tokens  # int64
        sizes["token_blocks"] = sizes["token_offsets"] = limits.max_tokens
        sizes["real_tokens"] = limits.max_tokens if limits.marks_real_tokens else 0
        sizes["source_slots"] = limits.max_requests if limits.restores_states else 0
        for name in ("cu_query", "cu_logits", "cu_seqlens", "cu_request_chunks"):
            sizes[name] = limits.max_requests + 1
        for name in ("uniforms", "accept_uniforms", "residual_uniforms"):
            sizes[name] = 2 * limits.max_logits  # float64
        sizes["logit_tokens"] = sizes["logit_requests"] = limits.max_logits
        sizes["columns"] = limits.max_requests * (1 + limits.max_drafts)
        sizes["cu_chunks"] = limits.max_chunks + 1
        sizes["chunk_requests"] = sizes["chunk_slots"] = limits.max_chunks
        sizes["block_table"] = limits.max_requests * limits.max_blocks
        return sizes

    def host(self, name: str) -> npt.NDArray[np.int32]:
        """Return the host view of a section; write it before `send`."""
        section: npt.NDArray[np.int32] = self._host_array[self._spans[name]]
        return section

    def device(self, name: str) -> Tensor:
        """Return the device view of a section; its address never changes."""
        return self._device[self._spans[name]]

    def host_int64(self, name: str) -> npt.NDArray[np.int64]:
        """Return the host view of an int64 section."""
        return self.host(name).view(np.int64)

    def device_int64(self, name: str) -> Tensor:
        """Return the device view of an int64 section; its address never changes."""
        return self.device(name).view(torch.int64)

    def host_block_table(self) -> npt.NDArray[np.int32]:
        """Return the host block table, [max_requests, max_blocks]."""
        return self.host("block_table").reshape(self.limits.max_requests, self.limits.max_blocks)

    def host_columns(self) -> npt.NDArray[np.int32]:
        """Return each request's live slot and draft slots on the host, [max_requests, 1 + max_drafts]."""
        return self.host("columns").reshape(self.limits.max_requests, 1 + self.limits.max_drafts)

    def device_columns(self) -> Tensor:
        """Return each request's live slot and draft slots on the device, [max_requests, 1 + max_drafts]."""
        return self.device("columns").view(self.limits.max_requests, 1 + self.limits.max_drafts)

    def device_block_table(self) -> Tensor:
        """Return the device block table, [max_requests, max_blocks]."""
        return self.device("block_table").view(self.limits.max_requests, self.limits.max_blocks)

    def followed_rows(self, num_requests: int, num_tokens: int) -> FollowedRows:
        """Return views of a decode step's inputs on the device, which `follow_step` replaces."""
        by_request = ("computed", "accepted", "kv_lengths", "last_block_lens")
        early, late = (self.device_int64(name)[:num_tokens] for name in FOLLOWED_UNIFORMS)
        return FollowedRows(
            cu_tokens=self.device("cu_query")[: num_requests + 1],
            **{name: self.device(name)[:num_requests] for name in by_request},
            token_ids=self.device_int64("token_ids")[:num_tokens],
            positions=self.device_int64("token_positions")[:num_tokens],
            token_blocks=self.device("token_blocks")[:num_tokens],
            token_offsets=self.device("token_offsets")[:num_tokens],
            uniforms=early,
            later_uniforms=late,
            block_table=self.device_block_table()[:num_requests],
        )

    def begin(self) -> None:
        """Wait until the previous step has been copied to the device, so that the host buffer can be overwritten."""
        self.num_begun += 1
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, num_table_rows: int) -> None:
        """Copy all sections to the device in one transfer; of the block table, only the first `num_table_rows` rows."""
        used = self._spans["block_table"].start + num_table_rows * self.limits.max_blocks
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record(stream_of(self._device))

    def feed(self, tokens: Tensor) -> None:
        """Replace the first n token ids on the device with `tokens`, [n]. Call this after `send`."""
        self.device_int64("token_ids")[: tokens.shape[0]].copy_(tokens)
