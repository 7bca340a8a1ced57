"""Concurrent sessions that differ from a file's: more of them, or with replies left out of the prompts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from megatron_mamba_cache.planning.plan import BlockText
from megatron_mamba_cache.planning.recorded_load import SESSIONS_START_WITHIN_S, RecordedLoad, RecordedRequest
from megatron_mamba_cache.policy.identifiers import BlockKey


def with_repeats(load: RecordedLoad, num_sessions: int) -> RecordedLoad:
    """Return a load of this many sessions, whose starts are spread evenly over the same time as those of a file.

    Args:
        load: Sessions of an agent.
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
    """Return texts whose blocks after the prompt are unique: no later prompt repeats the reply."""
    fresh = count(1 + max((key for text in texts for key in text.keys), default=0))
    in_prompt = [text.prompt_len // block_size for text in texts]
    return [
        replace(text, keys=[*text.keys[:kept], *(BlockKey(next(fresh)) for _ in text.keys[kept:])])
        for text, kept in zip(texts, in_prompt, strict=True)
    ]
