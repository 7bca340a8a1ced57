"""The drafters of a run's engines, as the flags choose them."""

from argparse import Namespace
from collections.abc import Callable

from ..config import CacheConfig
from ..mcore.model_ranks import ranks_of_process
from ..mcore.model_reading import model_shape_of
from ..models.drafting.draft_model import DraftModelDrafter
from ..speculation.drafter import Drafter
from ..speculation.prompt_lookup import PromptLookupDrafter
from .expected_memory import Settings
from .model_choice import draft_directory
from .ready_model import ReadyModel, load_weights
from .usage_error import UsageError

_FLAG = "--draft-hf-model"


def drafter_maker(arguments: Namespace, model: ReadyModel, settings: Settings) -> Callable[[], Drafter]:
    """Return a function that makes a drafter, since each engine needs its own. A draft model is loaded once, here.

    Args:
        model: The model that verifies the drafts; a draft model's weights get its dtype.
        settings: Gives the sizes of a draft model's own cache; called for each drafter.

    Raises:
        UsageError: If the draft model cannot be loaded or has another vocabulary.
    """
    directory = draft_directory(arguments)
    if directory is None:
        return PromptLookupDrafter
    draft_model = load_weights(directory, model.dtype, flag=_FLAG).model
    vocab_size = model_shape_of(model.model, ranks_of_process()).vocab_size
    if draft_model.vocab_size != vocab_size:
        raise UsageError(
            f"{_FLAG} {directory.path}: it has a vocabulary of {draft_model.vocab_size} tokens and the model one of "
            f"{vocab_size}; a draft model needs the same"
        )
    shape = model_shape_of(draft_model, ranks_of_process())

    def drafter() -> Drafter:
        return DraftModelDrafter(draft_model, CacheConfig(**settings(shape, draft_model.max_sequence_length)))

    return drafter
