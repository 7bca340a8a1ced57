"""Settings under which tiny models on any device are compared with the fp64 oracle and with transformers."""

import os

import torch


def set_usual() -> None:
    """Switch TF32 off, take one thread, and assume a CPU's speed: drafts of such models never pay on a GPU.

    Variables that set flags of the command are removed from the environment.
    """
    from megatron_mamba_cache.mcore import step_reads  # takes seconds: not before it is needed

    for name in [name for name in os.environ if name.startswith("MAMBA_CACHE_")]:
        del os.environ[name]
    torch.set_num_threads(1)  # the fastest for models this small
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    step_reads.GPU = step_reads.CPU
