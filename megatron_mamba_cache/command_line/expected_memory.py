"""Whether a model's requests fit the memory that flags give, known before a weight is read."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import CacheBudgetError, CacheError
from ..mcore.model_ranks import ranks_of_process
from ..mcore.process_groups import initialize_single_process
from ..models.checkpoints import hugging_face, megatron_checkpoint
from ..models.part_shape import rank_shape
from ..ranks.agreement import CacheCapacity
from ..state.model_shape import HybridModelShape
from .arguments import cache_config, name_flag
from .card_settings import DRAFTER_SHARE
from .model_choice import ModelDirectory, ModelFormat
from .quiet import own_warnings_hidden
from .usage_error import UsageError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_READERS = {ModelFormat.HUGGING_FACE: hugging_face.read_sizes, ModelFormat.MEGATRON: megatron_checkpoint.read_sizes}

Settings = Callable[[HybridModelShape, int], Mapping[str, Any]]
"""Returns fields of `CacheConfig` for a model's shape and the most tokens that it reads."""


def check_memory(arguments: Namespace, directory: ModelDirectory | None, device: str, settings: Settings) -> None:
    """Raise `UsageError` if the flags do not fit the model; all its ranks call it.

    A directory that cannot be read is passed over, since loading it says why; so is the random model (None), which is
    built at once.

    Args:
        device: "cpu" or "cuda".
        settings: Gives the settings where there are no flags.
    """
    if directory is None:
        return
    initialize_single_process()
    ranks = ranks_of_process()
    expected = _expected(directory, dtype_of_weights(directory, arguments.dtype, device))
    if not all(ranks.gather(expected is not None)) or expected is None:
        return
    shape, max_length = expected
    config = cache_config(arguments, settings(shape, max_length))
    share = 1 - DRAFTER_SHARE if arguments.drafter == "draft-model" else 1.0
    with errors_of_settings(share), own_warnings_hidden():
        shape.check(config)
        CacheCapacity.of(shape.resolved(config), shape, ranks)


def dtype_of_weights(directory: ModelDirectory | None, dtype: str | None, device: str) -> str | None:
    """Return the dtype that a model's weights get, "fp32" or "bf16"; None: the checkpoint's own.

    Args:
        dtype: What the flags say; None: the checkpoint's own on a GPU, and fp32 on a CPU and for built-in models.
    """
    if directory is not None and not directory.is_shipped and device == "cuda":
        return dtype
    return dtype or "fp32"


@contextmanager
def errors_of_settings(share: float) -> Iterator[None]:
    """Turn the errors of settings that do not fit the model or the machine into `UsageError`.

    Args:
        share: The model's share of one budget.
    """
    try:
        yield
    except CacheBudgetError as error:
        raise UsageError(str(error.of_whole(share))) from error
    except ValueError as error:
        raise UsageError(name_flag(str(error))) from error
    except CacheError as error:
        raise UsageError(str(error)) from error


def _expected(directory: ModelDirectory, dtype: str | None) -> tuple[HybridModelShape, int] | None:
    """Return the shape of this rank's part of a model, and the most tokens that it reads; None if it is not there."""
    if not directory.path.is_dir():
        return None
    try:
        architecture, stored = _READERS[directory.format](directory.path)
        return rank_shape(architecture, stored if dtype is None else DTYPES[dtype]), architecture.max_sequence_length
    except (ValueError, OSError):
        return None
