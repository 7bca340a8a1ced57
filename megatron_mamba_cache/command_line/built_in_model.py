"""The model that ships: small, random, built from a seed; and the engine around it."""

from dataclasses import dataclass
from typing import Any

import torch

from ..config import CacheConfig
from ..mcore.build import build_engine
from ..mcore.engine import MambaCacheEngine
from ..models.byte_tokenizer import ByteTokenizer
from ..models.random_hybrid import RandomHybridConfig, random_hybrid_model
from .arguments import name_flag
from .usage_error import UsageError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelAndTokenizer:
    """A model, its tokenizer, and a line that says what they are."""

    model: Any
    tokenizer: ByteTokenizer
    description: str


def built_in_model(dtype: str) -> ModelAndTokenizer:
    """Build the random hybrid on the current device, with TF32 off so that fp32 means it, and on one CPU thread.

    Work this small gains nothing from more threads, and waits for them a hundred times longer on a busy machine.
    """
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    shape = RandomHybridConfig(dtype=_DTYPES[dtype])
    description = (
        f"built-in random hybrid model, layers {shape.pattern} (M Mamba, * attention, - MLP), vocabulary of "
        f"{shape.vocab_size} bytes, {dtype}"
    )
    return ModelAndTokenizer(random_hybrid_model(shape), ByteTokenizer(shape.vocab_size), description)


def engine_for(model: ModelAndTokenizer, config: CacheConfig, seed: int) -> MambaCacheEngine:
    """Build an engine.

    Raises:
        UsageError: If the settings do not fit the model or the machine's memory.
    """
    try:
        return build_engine(model.model, config, tokenizer=model.tokenizer, random_seed=seed)
    except ValueError as error:
        raise UsageError(name_flag(str(error))) from error
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise UsageError(
            f"cannot allocate {config.buffer_size_gb:g} GiB of KV blocks and {config.prefix_caching_mamba_gb:g} GiB of "
            "cached states; lower --inference-dynamic-batching-buffer-size-gb or "
            "--inference-dynamic-batching-prefix-caching-mamba-gb"
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "alloc" in str(error)
