"""Order in which prompt lines run."""

import random

from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.command_line.prompts import PromptLine
from megatron_mamba_cache.command_line.request_runner import SessionQueue

SESSIONS = st.lists(st.none() | st.integers(0, 3) | st.sampled_from(["0", "a"]), max_size=20)


@given(sessions=SESSIONS, order=st.randoms(use_true_random=False))
def test_each_line_runs_once_after_earlier_lines_of_its_session(
    sessions: list[int | str | None], order: random.Random
) -> None:
    lines = [PromptLine(number, "", session=session) for number, session in enumerate(sessions)]
    queue = SessionQueue(lines)
    running = queue.initial_lines()
    finished: list[PromptLine] = []
    while running:
        alone = [line.session for line in running if line.session is not None]
        assert len(alone) == len(set(alone))
        line = running.pop(order.randrange(len(running)))
        finished.append(line)
        following = queue.line_after(line)
        running += [] if following is None else [following]
    assert sorted(line.request_id for line in finished) == list(range(len(lines)))
    for session in {line.session for line in lines} - {None}:
        numbers = [line.request_id for line in finished if line.session == session]
        assert numbers == sorted(numbers)


@given(sessions=SESSIONS)
def test_lines_without_a_session_start_immediately(sessions: list[int | str | None]) -> None:
    lines = [PromptLine(number, "", session=session) for number, session in enumerate(sessions)]
    waiting = [line for line in lines if line not in SessionQueue(lines).initial_lines()]
    assert all(line.session is not None and line.session in sessions[: line.request_id] for line in waiting)
