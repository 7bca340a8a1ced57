"""Check memory flags against a model's configuration before its weights are loaded."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from ..config import CacheConfig
from ..errors import CacheBudgetError, CacheError
from ..mcore.model_ranks import initialize_single_process, ranks_of_process
from ..models.checkpoints import hugging_face, megatron_checkpoint
from ..models.drafting.draft_model import check_draft_experts
from ..models.shard_shape import rank_shape
from ..ranks.agreement import CacheCapacity, resolved_settings
from ..ranks.group import Ranks
from ..recurrences.model_shape import HybridModelShape
from .arguments import cache_config, model_share, name_flag, with_auto_drafts
from .flag_sources import UsageError
from .model_choice import ModelDirectory, ModelFormat, draft_directory, fills_card
from .quiet import own_warnings_hidden
from .sizing import DRAFTER_SHARE, DRAFTER_STATES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_READERS = {ModelFormat.HUGGING_FACE: hugging_face.read_sizes, ModelFormat.MEGATRON: megatron_checkpoint.read_sizes}
_HEAD_READERS = {
    ModelFormat.HUGGING_FACE: hugging_face.read_head_pattern,
    ModelFormat.MEGATRON: megatron_checkpoint.read_head_pattern,
}

Settings = Callable[[HybridModelShape, int], Mapping[str, Any]]
"""Maps a model's shape and its maximum length in tokens to fields of `CacheConfig`."""

DraftSettings = Callable[[HybridModelShape, int, CacheConfig], Mapping[str, Any]]
"""Maps a draft model's shape, its maximum length and the engine's config to fields of `CacheConfig`; collective."""


def check_memory(
    arguments: Namespace,
    directory: ModelDirectory | None,
    device: str,
    settings: Settings,
    draft_settings: DraftSettings,
    *,
    loads_head: bool,
) -> None:
    """Raise `UsageError` if the memory flags are too small for the model or its draft model; collective over all ranks.

    The random model (`directory` is None) is not checked. A directory that cannot be read is not checked either,
    because loading it will report the error.

    Args:
        device: "cpu" or "cuda".
        settings: Returns the default settings of the model's cache.
        draft_settings: Returns the default settings of a draft model's cache.
        loads_head: True if a multi-token prediction head is loaded if the directory has one.
    """
    if directory is None:
        return
    initialize_single_process()
    ranks = ranks_of_process()
    stored = dtype_of_weights(directory, arguments.dtype, device)
    dtype = None if stored is None else DTYPES[stored]
    expected = _expected(directory, dtype, ranks, loads_head=loads_head)
    if expected is None:
        return
    arguments = with_auto_drafts(arguments, has_head=bool(expected[0].head_types))
    config = cache_config(arguments, settings(*expected))
    refused = [_refused(config, expected[0], ranks, model_share(arguments))]
    draft = draft_directory(arguments)
    expected_draft = None if draft is None else _expected(draft, expected[0].params_dtype, ranks)
    if expected_draft is not None:
        try:
            check_draft_experts(expected_draft[0], ranks)
        except ValueError as error:
            raise UsageError(f"--draft-hf-model {arguments.draft_hf_model}: {error}") from error
        drafting = CacheConfig(**{**draft_settings(*expected_draft, config), **DRAFTER_STATES})
        refused.append(_refused(drafting, expected_draft[0], ranks, DRAFTER_SHARE, is_draft=True))
    budgets = [budget for budget in refused if budget is not None]
    if budgets:
        raise UsageError(max(budgets, key=lambda budget: budget.least_gb).message)


def dtype_of_weights(directory: ModelDirectory | None, dtype: str | None, device: str) -> str | None:
    """Return the dtype for a model's weights, "fp32" or "bf16"; None to keep the dtype of the checkpoint.

    `dtype` is the value of the dtype flag. If it is None, a user's model on a GPU keeps the dtype of its checkpoint,
    and any other model uses fp32.
    """
    if fills_card(directory, device):
        return dtype
    return dtype or "fp32"


@contextmanager
def errors_of_settings(share: float, *, is_draft: bool = False) -> Iterator[None]:
    """Context manager that turns errors about cache settings and budgets into `UsageError` with the flags to change."""
    prefix = "the drafter's own cache: " if is_draft else ""
    try:
        yield
    except CacheBudgetError as error:
        raise UsageError(f"{prefix}{error.of_whole(share, is_draft=is_draft)}{_notes_of(error)}") from error
    except ValueError as error:
        raise UsageError(f"{prefix}{name_flag(str(error))}{_notes_of(error)}") from error
    except CacheError as error:
        raise UsageError(f"{prefix}{error}{_notes_of(error)}") from error


def _notes_of(error: Exception) -> str:
    return "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


class _Refused(NamedTuple):
    """Error message about a budget that is too small, and the smallest sufficient budget in GiB."""

    least_gb: float
    message: str


def _refused(
    config: CacheConfig, shape: HybridModelShape, ranks: Ranks, share: float, *, is_draft: bool = False
) -> _Refused | None:
    """Return the error for a budget that is too small, or None if it is sufficient; raise other errors."""
    try:
        with errors_of_settings(share, is_draft=is_draft), own_warnings_hidden():
            shape.check(config)
            CacheCapacity.of(resolved_settings(config, shape, ranks), shape, ranks)
    except UsageError as error:
        if not isinstance(error.__cause__, CacheBudgetError):
            raise
        return _Refused(error.__cause__.least_gb / share, str(error))
    return None


def _expected(
    directory: ModelDirectory, dtype: torch.dtype | None, ranks: Ranks, *, loads_head: bool = False
) -> tuple[HybridModelShape, int] | None:
    """Return the shape of this rank's shard and the model's maximum length; None if a rank cannot determine them."""
    expected = None
    if directory.path.is_dir():
        with suppress(ValueError, OSError), own_warnings_hidden():
            architecture, stored = _READERS[directory.format](directory.path)
            pattern = ""
            with suppress(ValueError, OSError):  # a file of weights that cannot be read; loading reports it
                pattern = _HEAD_READERS[directory.format](directory.path) if loads_head else ""
            expected = rank_shape(architecture, dtype or stored, pattern), architecture.max_sequence_length
    return expected if all(ranks.gather(expected is not None)) else None
