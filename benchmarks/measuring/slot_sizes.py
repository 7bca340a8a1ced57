"""Models and the sizes of their state slots, for benchmarks that copy whole states."""

from dataclasses import dataclass

import torch

WINDOW_LEN = 3
"""Conv inputs that a cached state keeps."""


@dataclass(frozen=True, slots=True)
class SlotModel:
    """Dimensions of a model's states; conv windows are bf16."""

    name: str
    num_layers: int
    conv_dim: int
    num_heads: int
    ssm_dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, summed over all layers and state types."""
        return self.num_layers * (WINDOW_LEN * self.conv_dim * 2 + self.num_heads * 128 * 64 * self.ssm_dtype.itemsize)


MODELS = (
    SlotModel("8B bf16", 24, 10240, 128, torch.bfloat16),
    SlotModel("8B fp32", 24, 10240, 128, torch.float32),
    SlotModel("Nano bf16", 23, 6144, 64, torch.bfloat16),
    SlotModel("Nano fp32", 23, 6144, 64, torch.float32),
)
