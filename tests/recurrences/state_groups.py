"""Groups of layers for tests: a window and a matrix, as Mamba2's layers have."""

import torch

from megatron_mamba_cache.recurrences.interface import StateGroup, StateTensor


def window_and_matrix(
    num_layers: int,
    window: tuple[int, ...],
    matrix: tuple[int, ...],
    window_dtype: torch.dtype,
    matrix_dtype: torch.dtype,
) -> StateGroup:
    """Return layers with a window of inputs, [inputs, channels], and a state, [heads, rows, channels]."""
    tensors = (
        StateTensor("conv", window, window_dtype, motion="window"),
        StateTensor("ssm", matrix, matrix_dtype, is_matrix=True),
    )
    return StateGroup(tuple(range(num_layers)), tensors)
