"""Content up to a marker; the white space before a marker belongs to neither."""

from collections.abc import Generator, Sequence

from .parts import Content, Part, Reasoning
from .text_feed import TextFeed


def text_until(
    feed: TextFeed, markers: Sequence[str], kind: type[Content] | type[Reasoning] = Content
) -> Generator[Part | None, None, tuple[str, str]]:
    """Yield the text before a marker, but for white space right before it; return that space and the marker.

    At the end of the reply the marker is "", and space at the end of content has been yielded.
    """
    held = ""
    reading = feed.until(markers)
    while True:
        try:
            piece = next(reading)
        except StopIteration as done:
            marker: str = done.value
            break
        if piece is None:
            yield None
            continue
        held += piece
        text = held.rstrip()
        if text:
            yield kind(text)
            held = held[len(text) :]
    if not marker and held and kind is Content:
        yield Content(held)
    return held, marker
