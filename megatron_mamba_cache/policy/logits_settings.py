"""A request's settings that change the logits before a token is sampled."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

_MOST_BIASED = 1024
_LARGEST = 1e4


@dataclass(frozen=True, slots=True)
class LogitsSettings:
    """Changes to the logits before each token is sampled, applied in the order of the fields.

    Args:
        logit_bias: Value to add to the logit of each of these token ids.
        min_tokens: Minimum number of generated tokens; before that, end tokens and single-token stop strings are not
            sampled.
        repetition_penalty: Divides the positive logits of tokens that occur in the prompt or reply, and multiplies the
            negative ones.
        frequency_penalty: Subtracted from a token's logit once per occurrence in the reply.
        presence_penalty: Subtracted once from the logit of each token that occurs in the reply.
        min_p: Minimum probability of a token relative to the most probable token, at the request's temperature; less
            probable tokens are not sampled.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0

    @property
    def depends_on_text(self) -> bool:
        """True if the changes depend on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    def problem(self, vocab_size: int) -> str | None:
        """Return an error message with an invalid setting, its value and the allowed range; None if all are valid."""
        outside = next((token for token, _ in self.logit_bias if not 0 <= token < vocab_size), None)
        if outside is not None:
            return f"logit_bias has token {outside}, outside the vocabulary of {vocab_size} tokens"
        if len(self.logit_bias) > _MOST_BIASED or not all(_is_moderate(bias) for _, bias in self.logit_bias):
            return f"logit_bias must have at most {_MOST_BIASED} tokens, and finite values of at most {_LARGEST:g}"
        for name in ("frequency_penalty", "presence_penalty"):
            if not _is_moderate(getattr(self, name)):
                return f"{name} is {getattr(self, name)}; it must be between {-_LARGEST:g} and {_LARGEST:g}"
        if not 1 / _LARGEST <= self.repetition_penalty <= _LARGEST:
            return (
                f"repetition_penalty is {self.repetition_penalty}; it must be between {1 / _LARGEST:g} and {_LARGEST:g}"
            )
        if not 0 <= self.min_p <= 1 or self.min_tokens < 0:
            return (
                "min_p must be between 0 and 1 and min_tokens at least 0, found "
                f"min_p={self.min_p}, min_tokens={self.min_tokens}"
            )
        return None


PLAIN_LOGITS = LogitsSettings()
"""Settings that leave the logits unchanged."""


def logits_settings_of(found: Any) -> LogitsSettings:
    """Return the settings that a mapping of field names to values contains; `PLAIN_LOGITS` if they change nothing.

    Raises:
        ValueError: If a key is unknown or a value has the wrong type.
    """
    if not found:
        return PLAIN_LOGITS
    names = {field.name for field in fields(LogitsSettings)}
    if not isinstance(found, Mapping) or not found.keys() <= names:
        raise ValueError(
            f"the logits settings are {found!r:.200}; they must be a mapping with keys among {sorted(names)}"
        )
    try:
        settings = LogitsSettings(
            logit_bias=tuple((int(token), float(bias)) for token, bias in found.get("logit_bias", ())),
            min_tokens=int(found.get("min_tokens", 0)),
            **{name: float(found[name]) for name in names - {"logit_bias", "min_tokens"} if name in found},
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the logits settings are {found!r:.200}, which are invalid: {error}") from error
    return PLAIN_LOGITS if settings == PLAIN_LOGITS else settings


def _is_moderate(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= _LARGEST
