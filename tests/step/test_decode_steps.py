"""Incremental steps equal a new layout, and are used only where they apply."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_mamba_cache.kernels.sampling.followed_steps import follow_step
from megatron_mamba_cache.policy.identifiers import BlockId, SlotId
from megatron_mamba_cache.policy.logits_settings import LogitsSettings
from megatron_mamba_cache.policy.request_settings import LogProbSettings, SamplingSettings
from megatron_mamba_cache.policy.requests import ReservedState, RunningRequest
from megatron_mamba_cache.step.batch import lay_out_step, send_padded_step
from megatron_mamba_cache.step.buffers import StepBuffers
from megatron_mamba_cache.step.decode_steps import DecodeStep, send_again, send_next
from megatron_mamba_cache.step.followed_steps import can_follow, send_followed
from megatron_mamba_cache.step.shapes import StepShape
from tests.step.step_requests import BLOCK, GEOMETRY, LIMITS, decoding

SHAPES = (StepShape(6, 1), StepShape(6, 4))
MOST_COMPUTED = LIMITS.max_blocks * BLOCK - LIMITS.max_drafts
GREEDY = SamplingSettings(top_k=1)
SAMPLED = SamplingSettings(temperature=0.7, top_p=0.9, seed=3)
PENALISED = SamplingSettings(temperature=0.7, logits=LogitsSettings(presence_penalty=0.5))


def send_anew(requests: list[RunningRequest], buffers: StepBuffers, shape: StepShape) -> None:
    send_padded_step(shape.pad(requests, GEOMETRY.dummy_block), buffers, GEOMETRY, shape)


def send(
    requests: list[RunningRequest], buffers: StepBuffers, shape: StepShape, last: DecodeStep | None
) -> tuple[DecodeStep | None, bool]:
    """Send a step, incrementally if possible; return the sent step, and True if it was incremental."""
    if last is not None and last.continues(requests, buffers, GEOMETRY.block_size):
        return send_again(last, requests, buffers, GEOMETRY.block_size, shape.num_requests), True
    send_anew(requests, buffers, shape)
    return DecodeStep.sent(requests, buffers), False


def same(buffers: StepBuffers, expected: StepBuffers) -> bool:
    return all(buffers.device(name).equal(expected.device(name)) for name in StepBuffers.SECTIONS)


def advance(request: RunningRequest, draw: random.Random, num_drafts: int = 0) -> None:
    """Finish the request's step, and schedule its next step with up to `num_drafts` drafts, as an engine does."""
    kept = draw.randrange(1, request.scheduled + 1)
    request.generated += [draw.randrange(1000) for _ in range(kept)]
    request.computed += kept
    request.cursor.accepted, request.reserved = kept, []
    request.drafts = tuple(draw.randrange(1000) for _ in range(num_drafts))
    request.cursor.draft_slots = [SlotId(draw.randrange(60)) for _ in range(max(num_drafts, kept - 1))]
    request.scheduled = 1 + num_drafts
    while request.computed + request.scheduled > len(request.block_ids) * BLOCK:
        request.block_ids.append(BlockId(draw.randrange(50)))


def disturb(requests: list[RunningRequest], shape: StepShape, draw: random.Random) -> None:
    """Make a change after which the next step must not be incremental."""
    request = draw.choice(requests)
    change = draw.randrange(7)
    if change == 0 and shape.width > 1:
        request.drafts = tuple(draw.randrange(1000) for _ in range(draw.randrange(1, shape.width)))
        request.scheduled = 1 + len(request.drafts)
        request.cursor.draft_slots = [
            SlotId(draw.randrange(60)) for _ in range(max(len(request.drafts), request.cursor.accepted - 1))
        ]
        while request.computed + request.scheduled > len(request.block_ids) * BLOCK:
            request.block_ids.append(BlockId(draw.randrange(50)))
    elif change == 1:
        request.reserved = [ReservedState((request.computed // BLOCK + 1) * BLOCK, SlotId(draw.randrange(60)))]
    elif change == 2:
        request.cursor.live_slot = SlotId(draw.randrange(60))
    elif change == 3 and len(requests) > 1:
        requests.remove(request)
    elif change == 4 and len(requests) < shape.num_decode_requests:
        requests.append(decoding(len(requests), prompt_len=draw.randrange(1, 20), num_generated=draw.randrange(1, 5)))
    elif change == 5:  # as when live states are read between steps
        request.cursor.resolved, request.cursor.accepted = request.computed, 1
    else:
        draw.shuffle(requests)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("shape", "num_drafts"), [*((shape, 0) for shape in SHAPES), (SHAPES[1], 1)])
@pytest.mark.parametrize("fold_len", [0, 4])
def test_incrementally_updated_step_equals_a_new_layout(
    device: str, shape: StepShape, num_drafts: int, fold_len: int, seed: int
) -> None:
    draw = random.Random(seed)
    samplings = [replace(SAMPLED, seed=index) if index % 2 == seed % 2 else GREEDY for index in range(4)]
    requests = [
        decoding(
            index, prompt_len=draw.randrange(1, 20), num_generated=1 + index, num_drafts=num_drafts, sampling=sampling
        )
        for index, sampling in enumerate(samplings[: 2 if num_drafts else 4])
    ]
    limits = replace(LIMITS, fold_len=fold_len)
    buffers, expected = StepBuffers(limits, device), StepBuffers(limits, device)
    last, num_quick = None, 0
    for _ in range(60):
        if draw.random() < 0.1:
            disturb(requests, shape, draw)
        if draw.random() < 0.05:  # a step with another shape, or without a graph
            for each in (buffers, expected):
                lay_out_step(requests[:1], each, GEOMETRY)
        last, was_quick = send(requests, buffers, shape, last)
        num_quick += was_quick
        send_anew(requests, expected, shape)
        assert same(buffers, expected)
        for request in requests:
            advance(request, draw, num_drafts)
        requests = [request for request in requests if request.computed < MOST_COMPUTED] or [
            decoding(0, num_drafts=num_drafts)
        ]
    assert num_quick >= 5


@pytest.mark.parametrize("change", ["another request", "a prompt to prefill", "another step", "no step between"])
def test_step_is_laid_out_anew_when_it_does_not_continue_the_last_step(device: str, change: str) -> None:
    buffers, requests = StepBuffers(LIMITS, device), [decoding(0, prompt_len=3), decoding(1, prompt_len=3)]
    send_anew(requests, buffers, SHAPES[0])
    last = DecodeStep.sent(requests, buffers)
    assert last is not None
    if change != "no step between":
        for request in requests:
            advance(request, random.Random(0))
        assert last.continues(requests, buffers, GEOMETRY.block_size)
    if change == "another request":
        requests[1] = decoding(1, prompt_len=3, num_generated=2)
    elif change == "another step":  # of other requests, at the last step's positions
        lay_out_step([decoding(index, prompt_len=3) for index in range(2)], buffers, GEOMETRY)
        assert buffers.host("computed")[:2].tolist() == [request.computed - 1 for request in requests]
    elif change == "a prompt to prefill":
        requests[1].spec = decoding(1, prompt_len=30).spec
    assert not last.continues(requests, buffers, GEOMETRY.block_size)


ENDING = SamplingSettings(top_k=1, termination_id=3)


def reserve_ahead(requests: list[RunningRequest], draw: random.Random) -> None:
    """Reserve blocks and slots for the next step, as an engine does; some boundaries get no slot."""
    for request in requests:
        if request.computed + 1 == len(request.block_ids) * BLOCK:
            request.block_ids.append(BlockId(draw.randrange(50)))
        if (request.computed + 2) % BLOCK == 0 and draw.random() < 0.7:
            request.reserved.append(ReservedState(request.computed + 2, SlotId(draw.randrange(60))))


def keep(requests: list[RunningRequest], tokens: list[int]) -> None:
    """Append each request's token, and publish the boundaries that the request has reached."""
    for request, token in zip(requests, tokens, strict=True):
        request.generated.append(token)
        request.computed += 1
        request.scheduled = 1
        request.reserved = [state for state in request.reserved if state.position > request.computed]


def publish(requests: list[RunningRequest], draw: random.Random) -> None:
    """Publish the completed blocks; sometimes, another request has published a block with the same tokens before."""
    for request in requests:
        if request.computed % BLOCK == 0 and draw.random() < 0.5:
            request.block_ids[request.computed // BLOCK - 1] = BlockId(draw.randrange(50))


@pytest.mark.parametrize("seed", range(20))
def test_next_step_is_launched_early_only_if_all_requests_continue(device: str, seed: int) -> None:
    draw, num_on = random.Random(seed), 0
    for _ in range(40):
        requests = [
            decoding(index, prompt_len=draw.randrange(1, 20), num_generated=draw.randrange(1, 9), sampling=ENDING)
            for index in range(draw.choice([1, 1, 2, 3]))
        ]
        for request in requests:
            request.spec = replace(request.spec, max_len=request.length + draw.choice([1, 2, 30]))
        buffers = StepBuffers(LIMITS, device)
        send_anew(requests, buffers, SHAPES[0])
        last = DecodeStep.sent(requests, buffers)
        assert last is not None
        tokens = np.array([draw.choice([1, 2, 3, 4, 5, 6, 7, 8]) for _ in requests])
        no_request_ends = not any(
            request.keep([int(token)]).ends for request, token in zip(requests, tokens, strict=True)
        )
        runs_on = last.can_launch_next(requests, tokens, buffers)
        assert runs_on is no_request_ends
        if runs_on:
            num_on += 1
            reserve_ahead(requests, draw)
            send_next(last, buffers, BLOCK, SHAPES[0].num_requests)
            assert not last.can_launch_next(requests, tokens, buffers)  # another step was sent since
    assert num_on >= 3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fold_len", [0, 4])
def test_steps_launched_early_equal_a_new_layout(device: str, fold_len: int, seed: int) -> None:
    """Steps cross boundaries: with new blocks, reserved slots, and completed blocks that others have published."""
    draw, limits = random.Random(seed), replace(LIMITS, fold_len=fold_len)
    samplings = [replace(SAMPLED, seed=index) if index % 2 == seed % 2 else GREEDY for index in range(4)]
    requests = [
        decoding(index, prompt_len=draw.randrange(1, 20), num_generated=draw.randrange(1, 9), sampling=sampling)
        for index, sampling in enumerate(samplings)
    ]
    buffers, expected = StepBuffers(limits, device), StepBuffers(limits, device)
    send_anew(requests, buffers, SHAPES[0])
    last = DecodeStep.sent(requests, buffers)
    num_next = num_new = 0
    while all(request.computed + 3 < MOST_COMPUTED for request in requests):
        assert last is not None
        before, tokens = buffers.host_block_table().copy(), [draw.randrange(1000) for _ in requests]
        goes_on = draw.random() < 0.8
        if goes_on:
            reserve_ahead(requests, draw)
            last = send_next(last, buffers, BLOCK, SHAPES[0].num_requests)
            buffers.feed(torch.tensor(tokens))
            keep(requests, tokens)
            send_anew(requests, expected, SHAPES[0])
            publish(requests, draw)  # the step lands while the next one runs
            num_next += 1
        else:
            keep(requests, tokens)
            publish(requests, draw)
            for request in requests:
                if request.computed == len(request.block_ids) * BLOCK:
                    request.block_ids.append(BlockId(draw.randrange(50)))
            last, goes_on = send(requests, buffers, SHAPES[0], last)
            send_anew(requests, expected, SHAPES[0])
        assert same(buffers, expected)
        begins = any(request.computed % BLOCK == 0 for request in requests)
        has_new_blocks = begins or bool((buffers.host_block_table() != before).any())
        assert last is not None and last.has_new_blocks is (goes_on and has_new_blocks)
        num_new += last.has_new_blocks
    print(f"{num_next} steps ran on, {num_new} of them with new blocks")
    assert num_next > 10 and num_new > 3


def reserve_followed(requests: list[RunningRequest], draw: random.Random) -> None:
    """Reserve blocks and slots for a step that follows, as an engine does; some boundaries get no slot."""
    for request in requests:
        most = request.computed + 2 * request.scheduled
        if most > len(request.block_ids) * BLOCK:
            request.block_ids.append(BlockId(draw.randrange(50)))
        boundary = (request.computed // BLOCK + 1) * BLOCK
        if request.computed + request.scheduled < boundary <= most and not request.reserved and draw.random() < 0.7:
            request.reserved.append(ReservedState(boundary, SlotId(draw.randrange(60))))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fold_len", [0, 4])
def test_steps_that_follow_on_the_device_equal_a_new_layout(device: str, fold_len: int, seed: int) -> None:
    draw, limits, shape = random.Random(seed), replace(LIMITS, fold_len=fold_len), SHAPES[1]
    samplings = [replace(SAMPLED, seed=index) if index % 2 == seed % 2 else GREEDY for index in range(4)]
    requests = [
        decoding(
            index,
            prompt_len=draw.randrange(1, 20),
            num_generated=draw.randrange(1, 9),
            num_drafts=3 if index else 0,
            sampling=sampling,
        )
        for index, sampling in enumerate(samplings)
    ]
    buffers, expected = StepBuffers(limits, device), StepBuffers(limits, device)
    send_anew(requests, buffers, shape)
    last, num_next = DecodeStep.sent(requests, buffers), 0
    longest = BLOCK * limits.max_blocks
    while last is not None and can_follow(last, requests, buffers, BLOCK, longest, is_planned=False):
        reserve_followed(requests, draw)
        before, lengths = buffers.host_block_table().copy(), buffers.host("kv_lengths").copy()
        last = send_followed(last, buffers, BLOCK, shape.num_requests)
        reaches_block = bool(((lengths - 1) // BLOCK != (buffers.host("kv_lengths") - 1) // BLOCK).any())
        assert last.has_new_blocks is (reaches_block or bool((buffers.host_block_table() != before).any()))
        kept = [draw.randint(1, request.scheduled) for request in requests]
        outcome = torch.tensor([[count, *(draw.randrange(1000) for _ in range(4))] for count in [*kept, 1, 1]])
        drafts = torch.tensor([[draw.randrange(1000) for _ in range(3)] for _ in range(6)])
        rows = buffers.followed_rows(shape.num_requests, shape.num_tokens)
        follow_step(outcome.to(device), drafts.to(device), rows, BLOCK)
        for row, (request, count) in enumerate(zip(requests, kept, strict=True)):
            request.generated += outcome[row, 1 : 1 + count].tolist()
            request.computed += count
            request.cursor.accepted = count
            request.drafts = tuple(drafts[row, : request.scheduled - 1].tolist())
        send_anew(requests, expected, shape)
        differing = [name for name in StepBuffers.SECTIONS if not buffers.device(name).equal(expected.device(name))]
        assert set(differing) <= {"accept_uniforms"}  # a copy of later random numbers, which the step does not read
        publish_reached(requests, kept, draw)  # the step lands while the next one runs
        num_next += 1
    print(f"{num_next} steps followed")
    assert num_next > 3


def publish_reached(requests: list[RunningRequest], kept: list[int], draw: random.Random) -> None:
    """Publish blocks and boundaries that requests reached; some blocks are replaced, as in `publish`."""
    for request, count in zip(requests, kept, strict=True):
        end = request.computed // BLOCK
        if end > (request.computed - count) // BLOCK and draw.random() < 0.5:
            request.block_ids[end - 1] = BlockId(draw.randrange(50))
        request.reserved = [state for state in request.reserved if state.position > request.computed]


@pytest.mark.parametrize("change", ["no drafts", "drafts too long", "an end", "the longest length", "an unknown page"])
def test_step_does_not_follow_on_the_device_if_the_host_must_know_the_outcome(device: str, change: str) -> None:
    """A request of 10 tokens, of which 9 are computed, decodes one token and one draft."""
    requests = [decoding(0, prompt_len=9, num_generated=1, num_drafts=0 if change == "no drafts" else 1)]
    if change == "an end":
        requests[0].spec = replace(requests[0].spec, max_len=11)
    buffers = StepBuffers(LIMITS, device)
    send_anew(requests, buffers, SHAPES[1])
    last = DecodeStep.sent(requests, buffers)
    assert last is not None
    block_size = {"drafts too long": 3, "an unknown page": 12}.get(change, 16)
    longest = 12 if change == "the longest length" else 13
    found = can_follow(last, requests, buffers, block_size, longest, is_planned=change == "an unknown page")
    assert not found
    if change in ("drafts too long", "the longest length", "an unknown page"):
        assert can_follow(last, requests, buffers, 16, 13, is_planned=True)


@pytest.mark.parametrize(
    "spec",
    [
        {"sampling": replace(ENDING, stop_words=((5, 6),))},
        {"sampling": PENALISED},
        {"log_probs": LogProbSettings(wanted=True)},
    ],
    ids=["stop words", "penalties", "log-probs"],
)
def test_stop_strings_penalties_and_log_probs_do_not_prevent_overlapped_steps(
    device: str, spec: dict[str, object]
) -> None:
    requests = [decoding(0), decoding(1)]
    requests[1].spec = replace(requests[1].spec, **spec)  # type: ignore[arg-type]
    buffers = StepBuffers(LIMITS, device)
    send_anew(requests, buffers, SHAPES[0])
    last = DecodeStep.sent(requests, buffers)
    assert last is not None and last.can_launch_next(requests, [1, 1], buffers)
    has_stop_word = bool(requests[1].spec.sampling.stop_words)
    assert last.can_launch_next(requests, [6, 5], buffers)
    assert last.can_launch_next(requests, [5, 6], buffers) is not has_stop_word  # token 6 may complete the stop string
