"""The drafters of a run's engines, as the flags choose them."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import CacheConfig
from ..mcore.model_ranks import ranks_of_process
from ..mcore.model_reading import model_shape_of
from ..models.drafting.draft_model import DraftModelDrafter
from ..speculation.drafter import Drafter
from ..speculation.prompt_lookup import PromptLookupDrafter
from ..state.model_shape import HybridModelShape
from .default_settings import default_settings
from .model_choice import ModelDirectory, ModelFormat
from .ready_model import load_weights
from .usage_error import UsageError

_FLAG = "--draft-hf-model"


Sizes = Callable[[HybridModelShape, int], dict[str, Any]]
"""Returns fields of `CacheConfig` for a model's shape and the most tokens that it reads."""


def drafter_maker(
    arguments: Namespace, vocab_size: int, dtype: str, sizes: Sizes = default_settings
) -> Callable[[], Drafter]:
    """Return a function that makes a drafter, since each engine needs its own. A draft model is loaded once, here.

    Args:
        vocab_size: Vocabulary of the model that verifies the drafts.
        dtype: Dtype of a draft model's weights, "fp32" or "bf16".
        sizes: Sizes of a draft model's own cache.

    Raises:
        UsageError: If the draft model cannot be loaded or has another vocabulary.
    """
    if arguments.drafter != "draft-model":
        return PromptLookupDrafter
    directory = ModelDirectory(Path(arguments.draft_hf_model), ModelFormat.HUGGING_FACE)
    model = load_weights(directory, dtype, flag=_FLAG).model
    if model.vocab_size != vocab_size:
        raise UsageError(
            f"{_FLAG} {directory.path}: it has a vocabulary of {model.vocab_size} tokens and the model one of "
            f"{vocab_size}; a draft model needs the same"
        )
    shape = model_shape_of(model, ranks_of_process())
    return lambda: DraftModelDrafter(model, CacheConfig(**sizes(shape, model.max_sequence_length)))
