"""Sizes of a draft model's own cache, which is a part of the memory where flags give one budget."""

from collections.abc import Callable, Mapping
from typing import Any

from ..config import SPLIT, CacheConfig
from ..mcore.model_ranks import ranks_of_process
from ..recurrences.model_shape import HybridModelShape
from .card_settings import DRAFTER_SHARE, Card, card_settings, longest_request
from .default_settings import default_settings

DRAFTER_STATES: dict[str, Any] = {"num_speculative_tokens": 1, "draft_states": "window"}
"""A request's states in a draft model's own cache: the live one, and the one after its newest draft."""

DraftSettings = Callable[[HybridModelShape, int, CacheConfig], Mapping[str, Any]]
"""Returns fields of `CacheConfig` for a draft model's shape, the most tokens that it reads, and the engine's settings.
All ranks of the model call it."""


def default_draft_settings(shape: HybridModelShape, max_length: int, given_gb: float | None) -> dict[str, Any]:
    """Return sizes that follow from the draft model; longer texts than its part of one budget holds get no drafts.

    Args:
        given_gb: GiB of the budget that a flag gives the model and its draft model; None: there is none.
    """
    fields = default_settings(shape, max_length)
    if given_gb is None:
        return fields
    budget_gb = DRAFTER_SHARE * given_gb
    kept = {name: value for name, value in fields.items() if name not in SPLIT}
    config = CacheConfig(**kept | DRAFTER_STATES)
    longest = longest_request(shape, config, budget_gb * 2**30, ranks_of_process())
    return kept | {"cache_gb": budget_gb, "max_sequence_length": min(config.max_sequence_length, longest)}


def card_draft_settings(
    shape: HybridModelShape, max_length: int, engine: CacheConfig, card: Card, given_gb: float | None
) -> dict[str, Any]:
    """Return sizes that fill the draft model's part of a GPU, for as many requests as the engine runs.

    Args:
        engine: The settings of the engine whose requests get the drafts.
        given_gb: See `default_draft_settings`; it takes the place of what the GPU leaves.
    """
    given = {"max_requests": engine.max_requests, "max_tokens": engine.max_tokens, "cache_gb": given_gb}
    length = min(max_length, engine.max_sequence_length)
    return card_settings(shape, length, card.part(DRAFTER_SHARE), given | DRAFTER_STATES, ranks_of_process())
