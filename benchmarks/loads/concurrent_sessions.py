"""More sessions than a file has: its own, and the first of them again with texts of their own."""

from dataclasses import replace

from megatron_mamba_cache.planning.recorded_load import SESSIONS_START_WITHIN_S, RecordedLoad, RecordedRequest


def with_repeats(load: RecordedLoad, num_sessions: int) -> RecordedLoad:
    """Return a load of so many sessions, which start spread evenly over the same time as those of a file.

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
