"""When the requests of a recorded load come to a server that takes its own time to answer them."""

from collections.abc import Sequence
from dataclasses import dataclass

from .block_texts import BlockText, block_texts
from .recorded_load import RecordedLoad


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request, and when it comes.

    Args:
        after: The request, by its place in the load, whose end it follows; None: it follows the start of the load.
        delay_s: Seconds between the two.
    """

    text: BlockText
    after: int | None
    delay_s: float


def open_loop(load: RecordedLoad, block_size: int) -> list[TimedRequest]:
    """Let each request come when it was recorded, however long the server takes."""
    texts = block_texts(load, block_size)
    return [TimedRequest(text, None, request.arrival_s) for request, text in zip(load.requests, texts, strict=True)]


def closed_loop(load: RecordedLoad, block_size: int) -> list[TimedRequest]:
    """Let each agent's requests wait for its answers.

    A request comes as long after the end of its agent's last one as it was recorded after that one came. The first of a
    sub-agent follows the request of the session before it, and the first of a session comes when it was recorded.
    """
    last: dict[tuple[int, int], int] = {}  # by session and agent
    timed = []
    texts: Sequence[BlockText] = block_texts(load, block_size)
    for place, (request, text) in enumerate(zip(load.requests, texts, strict=True)):
        agent = request.session, request.agent
        after = last.get(agent, last.get((request.session, 0)))
        start = 0.0 if after is None else load.requests[after].arrival_s
        timed.append(TimedRequest(text, after, request.arrival_s - start))
        last[agent] = place
    return timed
