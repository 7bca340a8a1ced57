"""The drafters of a run's engines, as the flags choose them."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import SPLIT, CacheConfig, argument_of
from ..mcore.model_ranks import ranks_of_process
from ..mcore.model_reading import model_shape_of
from ..models.drafting.draft_model import DraftModelDrafter
from ..speculation.drafter import Drafter
from ..speculation.prompt_lookup import PromptLookupDrafter
from ..state.model_shape import HybridModelShape
from .card_settings import DRAFTER_SHARE, longest_request
from .default_settings import default_settings
from .expected_memory import Settings
from .model_choice import ModelDirectory, ModelFormat
from .ready_model import load_weights
from .usage_error import UsageError

_FLAG = "--draft-hf-model"
DRAFTER_STATES: dict[str, Any] = {"num_speculative_tokens": 1, "draft_states": "window"}
"""A request's states in a draft model's own cache: the live one, and the one after its newest draft."""


def drafter_maker(
    arguments: Namespace, vocab_size: int, dtype: str, sizes: Settings = default_settings
) -> Callable[[], Drafter]:
    """Return a function that makes a drafter, since each engine needs its own. A draft model is loaded once, here.

    Args:
        vocab_size: Vocabulary of the model that verifies the drafts.
        dtype: Dtype of a draft model's weights, "fp32" or "bf16".
        sizes: Sizes of a draft model's own cache; of one budget that a flag gives, it has `DRAFTER_SHARE`.

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
    given_gb = getattr(arguments, argument_of("cache_gb"))

    def drafter() -> Drafter:
        fields = sizes(shape, model.max_sequence_length)
        if given_gb is not None:
            fields = _within(DRAFTER_SHARE * given_gb, fields, shape)
        return DraftModelDrafter(model, CacheConfig(**fields))

    return drafter


def _within(budget_gb: float, fields: Mapping[str, Any], shape: HybridModelShape) -> dict[str, Any]:
    """Return sizes with one budget in the place of a split; longer texts than it has room for get no drafts."""
    kept = {name: value for name, value in fields.items() if name not in SPLIT}
    config = CacheConfig(**kept | DRAFTER_STATES)
    longest = longest_request(shape, config, budget_gb * 2**30, ranks_of_process())
    return kept | {"cache_gb": budget_gb, "max_sequence_length": min(config.max_sequence_length, longest)}
