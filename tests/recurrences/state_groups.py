"""State groups for tests: each layer has a window and a matrix, as in Mamba2."""

import torch

from megatron_mamba_cache.recurrences.interface import StateGroup, StateTensor


def window_and_matrix(
    num_layers: int,
    window: tuple[int, ...],
    matrix: tuple[int, ...],
    window_dtype: torch.dtype,
    matrix_dtype: torch.dtype,
) -> StateGroup:
    """Return a group whose layers have a window [inputs, channels] and a state [heads, rows, channels]."""
    tensors = (
        StateTensor("conv", window, window_dtype, motion="window"),
        StateTensor("ssm", matrix, matrix_dtype, is_matrix=True),
    )
    return StateGroup(tuple(range(num_layers)), tensors)
