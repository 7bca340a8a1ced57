"""Choose a model's attention backend: the configured one, or the first of `BACKENDS` that supports the model."""

import logging
from typing import Protocol

import torch

from .flash_attn import FlashAttention2, FlashAttention3, TorchVarlenAttention
from .flashinfer import FlashInferAttention
from .interface import AttentionBackend, AttentionShape
from .reference import ReferenceAttention
from .slot_attention import TritonAttention

_FLAG = "--attention-backend"
_logger = logging.getLogger(__name__)


class BackendClass(Protocol):
    """Protocol for the classes in `BACKENDS`: each builds an attention backend and reports which models it supports."""

    name: str
    setting: str

    def __call__(self, shape: AttentionShape) -> AttentionBackend:
        """Build the backend; importing or testing its library may raise any exception."""

    def refusal(self, shape: AttentionShape) -> str | None:
        """Return why the backend does not support the model, or None if it does."""


BACKENDS: tuple[BackendClass, ...] = (
    FlashInferAttention,  # the benchmarked backend; splits the KV of long requests with few query tokens
    FlashAttention3,
    FlashAttention2,
    TorchVarlenAttention,
    TritonAttention,  # FP8 keys and values only
    ReferenceAttention,
)


def choose_attention(setting: str, shape: AttentionShape) -> AttentionBackend:
    """Build the attention backend that `setting` names; with "auto", the first in `BACKENDS` that can be used.

    Raises:
        ValueError: If no selected backend supports the model and can be built; the message gives the reasons.
    """
    refusals: list[str] = []
    for backend in BACKENDS:
        if setting not in ("auto", backend.setting):
            continue
        reason = backend.refusal(shape)
        if reason is None:
            try:
                chosen = backend(shape)
            except Exception as error:  # a broken installation or a missing compiler may raise any exception
                failure = f"it fails with {type(error).__name__}: {error}"
                if setting == "auto":
                    _logger.warning("attention does not use %s: %s", backend.name, failure)
                reason = failure.partition("\n")[0]  # the other lines may be a compiler's whole output
            else:
                is_half = shape.device.type == "cuda" and shape.dtype in (torch.float16, torch.bfloat16)
                if setting == "auto" and refusals and is_half:  # warn that a faster backend exists
                    _logger.warning("attention runs on %s, not on %s", chosen.name, refusals[0])
                return chosen
        refusals.append(f"{backend.name}: {reason}")
    raise ValueError(
        f"attention_backend {setting!r} cannot serve this model ({'; '.join(refusals)}); resolve the cause, or set "
        f"{_FLAG} to auto or reference"
    )


def refusals_for_usual_model() -> dict[str, str | None]:
    """Return, for each backend, why it cannot run a bf16 model with head_dim 128 on this machine; None if it can."""
    shape = AttentionShape(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=256,
        scale=128**-0.5,
        dtype=torch.bfloat16,
        device=torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu"),
    )
    return {backend.name: backend.refusal(shape) for backend in BACKENDS}
