"""A stand-in for the parts of Megatron's context that a slot allocator reads."""

from types import SimpleNamespace

import torch
from torch import Tensor

NUM_LAYERS, CONV_SHAPE, SSM_SHAPE = 2, (3, 6), (2, 4, 5)
LIVE_SLOTS = [4, 0, 3]  # live slots of requests 0, 1 and 2


def context(block_size: int = 64, num_blocks: int = 16, device: object = "cpu") -> SimpleNamespace:
    """Return a context for the allocator; request r has the block ids 100 * r, 100 * r + 1, and so on."""
    generator = torch.Generator().manual_seed(0)

    def states(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn((NUM_LAYERS, 5, *shape), generator=generator).to(device=device, dtype=dtype)

    return SimpleNamespace(
        block_size_tokens=block_size,
        max_tokens=8 * block_size,
        mamba_conv_states=states(CONV_SHAPE, torch.bfloat16),
        mamba_ssm_states=states(SSM_SHAPE, torch.float32),
        mamba_metadata=SimpleNamespace(request_to_mamba_state_idx=torch.tensor(LIVE_SLOTS)),
        request_to_kv_block_ids=[[100 * request + index for index in range(num_blocks)] for request in range(3)],
    )
