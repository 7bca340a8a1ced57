"""Attention by the torch twin: exact, of any shape, dtype and device; not fast."""

from functools import partial

from torch import Tensor

from ..attention_rows import AttentionRows
from ..reference_attention import paged_attention_ref
from .interface import AttentionShape, PlannedAttention


class ReferenceAttention:
    """`paged_attention_ref` as a backend."""

    name = setting = "reference"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return None: it serves any model."""
        return None

    def __init__(self, shape: AttentionShape) -> None:
        self._scale = shape.scale

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Return the call of a layer; there is nothing to prepare."""
        return partial(self._attend, rows)

    def _attend(self, rows: AttentionRows, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return paged_attention_ref(q, k_cache, v_cache, rows, self._scale)
