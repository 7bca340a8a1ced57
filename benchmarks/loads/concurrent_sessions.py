"""Variants of recorded sessions: more concurrent sessions, or prompts without earlier replies."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from megatron_mamba_cache.planning.plan import BlockText
from megatron_mamba_cache.planning.recorded_load import SESSIONS_START_WITHIN_S, RecordedLoad, RecordedRequest
from megatron_mamba_cache.policy.identifiers import BlockKey


def with_repeats(load: RecordedLoad, num_sessions: int) -> RecordedLoad:
    """Return a load of `num_sessions` sessions, repeating the recorded ones with different texts if there are too few.

    Their starts are spread evenly over the time in which the recorded sessions start.

    Args:
        load: Recorded sessions of an agent.
    """
    by_session: dict[int, list[RecordedRequest]] = {}
    for request in load.requests:
        by_session.setdefault(request.session, []).append(request)
    recorded = [by_session[session] for session in sorted(by_session)]
    requests: list[RecordedRequest] = []
    for number in range(num_sessions):
        session = recorded[number % len(recorded)]
        moved_s = SESSIONS_START_WITHIN_S * number / num_sessions - session[0].arrival_s
        requests += [
            replace(
                request,
                arrival_s=request.arrival_s + moved_s,
                session=number,
                content=tuple((number, content) for _, content in request.content),
            )
            for request in session
        ]
    return RecordedLoad(load.tokens_per_id, tuple(sorted(requests, key=lambda request: request.arrival_s)))


def without_replies(texts: Sequence[BlockText], block_size: int) -> list[BlockText]:
    """Return the texts with unique blocks for the replies, so that no later prompt contains a reply."""
    fresh = count(1 + max((key for text in texts for key in text.keys), default=0))
    in_prompt = [text.prompt_len // block_size for text in texts]
    return [
        replace(text, keys=[*text.keys[:kept], *(BlockKey(next(fresh)) for _ in text.keys[kept:])])
        for text, kept in zip(texts, in_prompt, strict=True)
    ]
