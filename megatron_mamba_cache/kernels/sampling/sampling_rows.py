"""Rows of logits, and how a token of each is drawn."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Logits and each row's settings; tensors of one device.

    Args:
        logits: [rows, vocab].
        temperature: [rows]; 0 takes the most probable token.
        top_k: [rows] integers; 0 is off, 1 takes the most probable token.
        top_p: [rows]; 0 or 1 is off.
    """

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
