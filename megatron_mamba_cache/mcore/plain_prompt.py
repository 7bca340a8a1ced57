"""Prompts in the forms that Megatron's engine takes: text, or a list of token ids."""

from typing import Any

import numpy as np
from torch import Tensor


def plain_prompt(prompt: Any) -> str | list[int]:
    """Return text as it is, and token ids in any sequence, array or tensor as a list.

    Raises:
        TypeError: If it is neither.
        ValueError: If an entry is not a 64-bit integer; the message names it and its place.
    """
    if isinstance(prompt, str):
        return prompt
    tokens = prompt.tolist() if isinstance(prompt, Tensor | np.ndarray) else prompt
    try:
        tokens = list(tokens)
    except TypeError:
        raise TypeError(f"a prompt is text or a sequence of token ids, found {prompt!r:.100}") from None
    for place, token in enumerate(tokens):
        is_integer = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not (is_integer and -(2**63) <= token < 2**63):
            raise ValueError(f"token {place} of the prompt is {token!r:.100}; token ids are integers of 64 bits")
    return [int(token) for token in tokens]
