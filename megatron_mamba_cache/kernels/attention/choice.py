"""Choose a model's attention backend: the first of `BACKENDS` that can serve it, or the configured one."""

import logging
from typing import Protocol

import torch

from .flash_attn import FlashAttention2, FlashAttention3, TorchVarlenAttention
from .flashinfer import FlashInferAttention
from .interface import AttentionBackend, AttentionShape
from .reference import ReferenceAttention

_FLAG = "--attention-backend"
_logger = logging.getLogger(__name__)


class BackendClass(Protocol):
    """The class of a backend."""

    name: str
    setting: str

    def __call__(self, shape: AttentionShape) -> AttentionBackend:
        """Build a backend; its library may raise anything."""

    def refusal(self, shape: AttentionShape) -> str | None:
        """Return why it cannot serve a model; None if it can."""


BACKENDS: tuple[BackendClass, ...] = (
    FlashInferAttention,  # which the benchmarks measure, and which divides long rows of few query tokens
    FlashAttention3,
    FlashAttention2,
    TorchVarlenAttention,
    ReferenceAttention,
)


def choose_attention(setting: str, shape: AttentionShape) -> AttentionBackend:
    """Build the backend of a model; `setting` is that of a backend, or "auto".

    Raises:
        ValueError: If the named backend cannot serve the model, or its library fails.
    """
    refusals: list[str] = []
    for backend in BACKENDS:
        if setting not in ("auto", backend.setting):
            continue
        reason = backend.refusal(shape)
        if reason is None:
            try:
                chosen = backend(shape)
            except Exception as error:  # a broken installation or a missing compiler may raise anything
                failure = f"it fails with {type(error).__name__}: {error}"
                if setting == "auto":
                    _logger.warning("attention does not use %s: %s", backend.name, failure)
                reason = failure.partition("\n")[0]  # a compiler's whole output may follow
            else:
                if setting == "auto" and refusals and _suits_libraries(shape):
                    _logger.warning("attention runs on %s, not on %s", chosen.name, refusals[0])
                return chosen
        refusals.append(f"{backend.name}: {reason}")
    raise ValueError(
        f"attention_backend is {setting!r}, which cannot serve this model ({'; '.join(refusals)}); fix that, or set "
        f"{_FLAG} to auto or reference"
    )


def _suits_libraries(shape: AttentionShape) -> bool:
    """Return True if the first backend is preferable: with a GPU, in half precision."""
    return shape.device.type == "cuda" and shape.dtype in (torch.float16, torch.bfloat16)


def refusals_for_usual_model() -> dict[str, str | None]:
    """Return, by name, why backends cannot serve bfloat16, 128 channels per head and blocks of 256 here."""
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
