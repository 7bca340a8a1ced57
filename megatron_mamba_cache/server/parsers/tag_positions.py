"""Positions in a reply's text at which tags begin, as opposed to text that mentions a tag."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Self


class TagPositions:
    """The positions in one reply.

    Args:
        tokens: Tokens that are tags, and their texts.
    """

    def __init__(self, tokens: Mapping[int, str]) -> None:
        self._tokens = tokens
        self._places: dict[str, set[int]] = {tag: set() for tag in tokens.values()}

    @property
    def texts(self) -> Collection[str]:
        """The texts of the tags."""
        return self._places.keys()

    def find(self, token: int, text: str, start: int) -> int | None:
        """Return the position of a token's tag, and keep it; None if the token is not a tag.

        Args:
            text: What the token adds to the reply's text.
            start: Characters of the reply before `text`.
        """
        tag = self._tokens.get(token)
        at = -1 if tag is None else text.rfind(tag)
        if tag is None or at < 0:
            return None
        self._places[tag].add(start + at)
        return start + at

    def joined(self, found: Sequence[tuple[str, int]]) -> Self:
        """Return these positions and those of tags that a parser has found."""
        joined = type(self)(self._tokens)
        for tag, places in self._places.items():
            joined._places[tag] = {*places}
        for tag, place in found:
            joined._places.setdefault(tag, set()).add(place)
        return joined

    def in_rewritten(self, rewritten: str, text: str) -> Iterable[int]:
        """Yield the positions of the same tags in what a template has written for a reply.

        If the template writes a tag more or fewer times than the reply, each of them counts.

        Args:
            text: The reply's.
        """
        for tag, places in self._places.items():
            own, others = _mentions(tag, text), _mentions(tag, rewritten)
            counts = [at in places for at in own] if len(own) == len(others) else [True] * len(others)
            yield from (at for at, does_count in zip(others, counts, strict=True) if does_count)


def _mentions(tag: str, text: str) -> list[int]:
    return [found.start() for found in re.finditer(re.escape(tag), text)]
