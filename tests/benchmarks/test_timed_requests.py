"""Requests of a recorded load arrive at their recorded times, or after earlier replies."""

from dataclasses import replace

from benchmarks.loads.simulated_server import closed_loop, open_loop
from megatron_mamba_cache.planning.recorded_load import RecordedLoad, RecordedRequest


def asked(at: float, session: int, agent: int = 0) -> RecordedRequest:
    return RecordedRequest(at, session, 64, 1, ((session, 0),), agent)


LOAD = RecordedLoad(
    64, (asked(0, 0), asked(5, 1), asked(7, 0), asked(8, 0, agent=1), asked(9, 0, agent=1), asked(10, 0), asked(12, 1))
)


def test_open_loop_requests_arrive_at_their_recorded_times() -> None:
    assert [(request.after, request.delay_s) for request in open_loop(LOAD, 64)] == [
        (None, request.arrival_s) for request in LOAD.requests
    ]


def test_each_agent_waits_only_for_its_own_replies() -> None:
    assert [(request.after, request.delay_s) for request in closed_loop(LOAD, 64)] == [
        (None, 0.0),
        (None, 5.0),
        (0, 7.0),
        (2, 1.0),  # the sub-agent waits for the request before it
        (3, 1.0),
        (2, 3.0),  # the main agent does not wait for the sub-agent
        (1, 7.0),
    ]


def test_first_request_of_a_lone_sub_agent_arrives_at_its_recorded_time() -> None:
    load = replace(LOAD, requests=(asked(3, 0, agent=1), asked(4, 0)))
    assert [(request.after, request.delay_s) for request in closed_loop(load, 64)] == [(None, 3.0), (None, 4.0)]
