"""Tokens of a request, and the tokens that end it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.policy.block_hashing import BlockKeyChain
from megatron_mamba_cache.policy.identifiers import SlotId
from megatron_mamba_cache.policy.kept_tokens import KeptTokens
from megatron_mamba_cache.policy.request_settings import LogProbSettings, RequestSpec, SamplingSettings
from megatron_mamba_cache.policy.requests import RunningRequest, StateCursor


def running_request(
    prompt: list[int], generated: list[int], *, max_len: int = 100, sampling: SamplingSettings | None = None
) -> RunningRequest:
    """Return a request whose step computes its last known token and samples the next token."""
    spec = RequestSpec(0, np.array(prompt, dtype=np.int64), max_len, sampling or SamplingSettings())
    return RunningRequest(
        spec=spec,
        chain=BlockKeyChain(bytes(32), 4),
        epoch=0,
        age=0,
        cursor=StateCursor(SlotId(0)),
        block_ids=[],
        num_shared_blocks=0,
        computed=len(prompt) + len(generated) - 1,
        scheduled=1,
        generated=list(generated),
    )


def ends_with(request: RunningRequest, token: int) -> bool:
    kept = request.keep([token])
    assert kept.tokens == (token,)
    return kept.ends


def stops(words: tuple[tuple[int, ...], ...], generated: list[int], token: int, prompt: tuple[int, ...] = (9,)) -> bool:
    return ends_with(running_request([*prompt], generated, sampling=SamplingSettings(stop_words=words)), token)


def test_termination_token_ends_its_request() -> None:
    request = running_request([1], [2], sampling=SamplingSettings(termination_id=7))
    assert ends_with(request, 7) and not ends_with(request, 6)


def test_token_at_the_length_limit_ends_a_request() -> None:
    assert not ends_with(running_request([1, 2], [3], max_len=5), 4)
    assert ends_with(running_request([1, 2], [3, 4], max_len=5), 4)
    assert ends_with(running_request([1, 2], [], max_len=3), 4)


def test_no_token_ends_a_request_without_end_tokens_or_stop_strings() -> None:
    request = running_request([1], [2, 3])
    assert not any(ends_with(request, token) for token in range(10))


def test_stop_string_of_one_token_ends_a_request() -> None:
    assert stops(((5,),), [], 5) and stops(((5,),), [5, 5, 1], 5)
    assert not stops(((5,),), [5], 4)


def test_stop_string_ends_a_request_only_with_its_last_token() -> None:
    word = ((3, 4, 5),)
    assert stops(word, [1, 3, 4], 5)
    assert not stops(word, [1, 3], 4)
    assert not stops(word, [3, 4, 5], 6)
    assert not stops(word, [3, 1, 4], 5)


def test_stop_string_longer_than_the_reply_does_not_match() -> None:
    assert not stops(((3, 4, 5),), [], 5)
    assert not stops(((3, 4, 5),), [4], 5)
    assert stops(((3, 4, 5),), [3, 4], 5)


def test_stop_string_does_not_match_across_the_prompt_end() -> None:
    assert not stops(((3, 4),), [], 4, prompt=(1, 3))


@pytest.mark.parametrize("num_replayed", range(4))
def test_interrupted_request_ends_at_the_same_token(num_replayed: int) -> None:
    prompt, reply, word = [7, 5], [5, 6, 8], (5, 6, 8, 9)
    spec = RequestSpec(
        0,
        np.array([*prompt, *reply[:num_replayed]]),
        100,
        SamplingSettings(stop_words=(word, (7, 5, 5, 6, 8, 9), (1,))),
        num_replayed=num_replayed,
    )
    request = running_request(prompt, reply[num_replayed:])
    request.spec, request.computed = spec, len(prompt) + len(reply) - 1
    assert ends_with(request, 9) and ends_with(request, 1) and not ends_with(request, 8)
    request.spec = dataclasses.replace(spec, sampling=SamplingSettings(stop_words=((7, 5, 5, 6, 8, 9),)))
    assert not ends_with(request, 9)


def test_any_of_several_stop_strings_ends_a_request() -> None:
    words = ((1, 2), (2,), (7, 8, 9))
    assert stops(words, [], 2) and stops(words, [7, 8], 9) and not stops(words, [7], 9)


@given(
    st.lists(st.integers(0, 2), max_size=6),
    st.integers(0, 2),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_match_only_the_end_of_the_reply(generated: list[int], token: int, words: list[list[int]]) -> None:
    text = "".join(map(str, [*generated, token]))
    expected = any(text.endswith("".join(map(str, word))) for word in words)
    assert stops(tuple(map(tuple, words)), generated, token) == expected


# What is kept of accepted drafts.


def drafted(request: RunningRequest, num_drafts: int) -> RunningRequest:
    """Add drafts to the request's step."""
    request.drafts = (0,) * num_drafts
    request.scheduled = 1 + num_drafts
    return request


def test_all_accepted_tokens_are_kept_if_none_ends_the_request() -> None:
    request = drafted(running_request([1], [2]), 4)
    assert request.keep([3, 4, 5]) == KeptTokens((3, 4, 5), ends=False)


@pytest.mark.parametrize("index", range(5))
def test_no_draft_is_kept_after_an_end_token(index: int) -> None:
    emitted = [1, 2, 3, 4, 5]
    request = drafted(running_request([9], [9], sampling=SamplingSettings(termination_id=emitted[index])), 4)
    assert request.keep(emitted) == KeptTokens(tuple(emitted[: index + 1]), ends=True)


@pytest.mark.parametrize("index", range(5))
def test_no_token_is_kept_after_the_length_limit(index: int) -> None:
    request = drafted(running_request([9], [9], max_len=3 + index), 4)
    assert request.keep([1, 2, 3, 4, 5]) == KeptTokens((1, 2, 3, 4, 5)[: index + 1], ends=True)


@pytest.mark.parametrize(
    ("word", "num_kept"), [((7, 8, 1), 1), ((8, 1, 2), 2), ((2, 3, 4), 4), ((7, 8, 1, 2, 3, 4, 5), 5)]
)
def test_no_token_is_kept_after_a_stop_string(word: tuple[int, ...], num_kept: int) -> None:
    request = drafted(running_request([9], [7, 8], sampling=SamplingSettings(stop_words=(word,))), 4)
    assert request.keep([1, 2, 3, 4, 5]) == KeptTokens((1, 2, 3, 4, 5)[:num_kept], ends=True)


def test_stop_string_completed_only_by_rejected_drafts_does_not_end_the_request() -> None:
    request = drafted(running_request([9], [7], sampling=SamplingSettings(stop_words=((7, 1, 2),))), 4)
    assert request.keep([1]) == KeptTokens((1,), ends=False)


def test_prefilling_request_discards_its_sampled_token() -> None:
    request = running_request([1, 2, 3], [], sampling=SamplingSettings(termination_id=4))
    request.computed, request.scheduled = 0, 2
    assert request.keep([4]) == KeptTokens((), ends=False)


SMALL_TOKENS = st.integers(0, 2)


@given(
    st.lists(SMALL_TOKENS, max_size=5),
    st.lists(SMALL_TOKENS, min_size=1, max_size=9),
    st.lists(st.lists(SMALL_TOKENS, min_size=1, max_size=5), max_size=2),
    st.integers(-1, 3),
    st.integers(1, 16),
)
def test_accepted_tokens_equal_those_of_single_token_steps(
    generated: list[int], emitted: list[int], words: list[list[int]], end_token: int, room: int
) -> None:
    settings = SamplingSettings(termination_id=end_token, stop_words=tuple(map(tuple, words)))
    max_len = 1 + len(generated) + room
    request = drafted(running_request([9], generated, max_len=max_len, sampling=settings), len(emitted) - 1)
    kept, text = [], list(generated)
    for token in emitted:
        step = running_request([9], text, max_len=max_len, sampling=settings).keep([token])
        kept.append(token)
        text.append(token)
        if step.ends:
            break
    assert request.keep(emitted) == KeptTokens(tuple(kept), ends=step.ends)


def test_step_inputs_are_a_prompt_slice_or_the_last_token_with_drafts() -> None:
    request = drafted(running_request([1, 2, 3], [4, 5]), 0)
    request.drafts, request.scheduled = (6, 7), 3
    assert list(request.inputs) == [5, 6, 7]
    request.drafts, request.scheduled = (), 1
    assert list(request.inputs) == [5]
    request.computed, request.scheduled = 1, 2
    assert list(request.inputs) == [2, 3]


@given(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.lists(st.integers(0, 99), max_size=6), st.data())
def test_request_tokens_are_sliced_across_prompt_and_reply(
    prompt: list[int], generated: list[int], data: st.DataObject
) -> None:
    whole = [*prompt, *generated]
    end = data.draw(st.integers(0, len(whole)))
    start = data.draw(st.integers(0, end))
    assert list(running_request(prompt, generated).tokens(start, end)) == whole[start:end]


def test_slice_of_request_tokens_may_span_the_prompt_end() -> None:
    request = running_request([1, 2, 3], [4, 5])
    assert list(request.tokens(2, 4)) == [3, 4]
    assert list(request.tokens(0, 5)) == [1, 2, 3, 4, 5]
    assert list(request.tokens(3, 5)) == [4, 5]
    assert list(request.tokens(0, 3)) == [1, 2, 3]
    assert list(request.tokens(3, 3)) == []


def test_request_samples_only_when_its_last_known_token_is_computed() -> None:
    request = running_request([1, 2, 3], [])
    request.computed, request.scheduled = 0, 2
    assert not request.samples_this_step and request.is_prefilling
    request.computed, request.scheduled = 2, 1
    assert request.samples_this_step
    request.computed, request.scheduled, request.generated = 3, 1, [4]
    assert request.samples_this_step and not request.is_prefilling and request.length == 4
    request.scheduled, request.drafts = 3, (5, 6)
    assert request.samples_this_step and request.length == 4


@pytest.mark.parametrize(
    ("settings", "is_greedy"),
    [
        (SamplingSettings(), False),
        (SamplingSettings(top_k=1), True),
        (SamplingSettings(temperature=0.0, top_k=5), True),
        (SamplingSettings(top_k=2, top_p=0.1), False),
    ],
)
def test_greedy_requests_need_no_random_number(settings: SamplingSettings, is_greedy: bool) -> None:
    assert settings.is_greedy == is_greedy


@pytest.mark.parametrize(
    ("settings", "may_skip"),
    [
        (LogProbSettings(), True),
        (LogProbSettings(wanted=True), False),
        (LogProbSettings(wanted=True, skip_prompt=True), True),
        (LogProbSettings(skip_prompt=True), True),
    ],
)
def test_only_prompt_log_probs_prevent_prefix_reuse(settings: LogProbSettings, may_skip: bool) -> None:
    spec = RequestSpec(0, np.array([1]), 5, SamplingSettings(), log_probs=settings)
    assert spec.may_skip == may_skip


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_live_state_is_in_the_slot_of_the_last_accepted_draft(accepted: int) -> None:
    request = running_request([1], [])
    request.cursor.draft_slots, request.cursor.accepted = [SlotId(5), SlotId(3), SlotId(8)], accepted
    assert request.cursor.state_slot == [0, 5, 3, 8][accepted - 1]


def test_requests_with_equal_content_compare_unequal() -> None:
    requests = [running_request([1, 2], []), running_request([1, 2], [])]
    assert requests.index(requests[1]) == 1 and requests[0].spec != requests[1].spec
