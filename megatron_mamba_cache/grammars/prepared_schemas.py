"""JSON schemas as llguidance holds to them, step by step; what cannot be written so is refused."""

from collections.abc import Callable
from typing import Any

from ..errors import GrammarError
from .endless_schemas import close_endless
from .exclusive_branches import exclude_branches
from .forms import GUIDANCE
from .held_words import Fault, hold_words
from .narrowed_schemas import check_escapes, guidance_for, narrow
from .property_names import close_names

GoesOn = Callable[[dict[str, Any], str], bool]
"""Returns whether a reply of a schema may go on with a quote after some text."""


def prepared(schema: dict[str, Any], goes_on: GoesOn, fault: Fault) -> dict[str, Any]:
    """Return a schema whose replies are valid by the given one, which is used up, and can always come to an end.

    Raises:
        GrammarError: If the schema cannot be held to; it says where and why.
    """
    settings = schema.get(GUIDANCE, {})
    try:
        held = {word: value for word, value in schema.items() if word != GUIDANCE}
        hold_words(held, fault)
        exclude_branches(held)
        close_endless(held)
        settings = {**settings, **guidance_for(held)}
        close_names(held, lambda found: goes_on({**found, GUIDANCE: settings}, "{"))
        narrow(held)
        settings = {**settings, **guidance_for(held)}
        check_escapes(held, lambda found: goes_on({**found, GUIDANCE: settings}, ""))
    except RecursionError as error:
        raise GrammarError("the schema is nested too deeply") from error
    return {**held, GUIDANCE: settings}
