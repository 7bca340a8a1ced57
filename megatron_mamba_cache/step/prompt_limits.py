"""The limit on prompt tokens beside rows that decode, for steps that are padded to captured ones."""

from collections.abc import Callable, Collection, Sequence

from ..config import CacheConfig
from ..policy.prompt_limit import PromptLimit
from ..state.model_shape import HybridModelShape
from .shapes import StepShape, filling_tokens


def prompt_limit(
    config: CacheConfig, model: HybridModelShape, shapes: Callable[[], Collection[StepShape]], *, shares_steps: bool
) -> PromptLimit | None:
    """Return the limit that settings ask for, None if there is none.

    Args:
        shapes: Returns those of the captured steps.
        shares_steps: Whether other ranks' rows are in the same step: there may be as many as can be.
    """
    if config.max_prompt_tokens_beside_decode is None:
        return None

    def filling(num_decoding: int) -> Sequence[int]:
        return filling_tokens(shapes(), config.max_requests - 1 if shares_steps else num_decoding)

    return PromptLimit(config.max_prompt_tokens_beside_decode, model.attention_share, filling)
