"""Running requests for tests of a step's layout."""

import random

import numpy as np

from megatron_mamba_cache.policy.block_hashing import BlockKeyChain
from megatron_mamba_cache.policy.identifiers import BlockId, SlotId
from megatron_mamba_cache.policy.request_settings import RequestSpec, SamplingSettings
from megatron_mamba_cache.policy.requests import ReservedState, RunningRequest, StateCursor
from megatron_mamba_cache.step.batch import StepBatch, StepGeometry, lay_out_step
from megatron_mamba_cache.step.buffers import StepBuffers, StepLimits

BLOCK, SSM_CHUNK, DUMMY = 8, 4, 999
GEOMETRY = StepGeometry(BLOCK, SSM_CHUNK, DUMMY)
MOST_DRAFTS = 7

LIMITS = StepLimits(
    max_tokens=256, max_requests=8, max_chunks=256 // SSM_CHUNK + 16, max_blocks=8, max_drafts=MOST_DRAFTS
)


def running_request(
    index: int,
    *,
    prompt_len: int,
    computed: int,
    scheduled: int,
    num_generated: int = 0,
    num_shared: int = 0,
    source_slot: int | None = None,
    reserved: dict[int, int] | None = None,
    sampling: SamplingSettings | None = None,
    num_drafts: int = 0,
    accepted: int = 1,
) -> RunningRequest:
    """Return a request with tokens, blocks and slots that follow from its index and differ from other requests'."""
    num_blocks = -(-(prompt_len + num_generated + num_drafts) // BLOCK)
    prompt = np.arange(prompt_len, dtype=np.int64) + 1000 * index
    spec = RequestSpec(index, prompt, 10_000, sampling or SamplingSettings(top_k=1))
    return RunningRequest(
        spec=spec,
        chain=BlockKeyChain(bytes(32), BLOCK),
        epoch=0,
        age=index,
        cursor=StateCursor(
            SlotId(50 + index),
            draft_slots=[SlotId(300 + 10 * index + column) for column in range(max(num_drafts, accepted - 1))],
            accepted=accepted,
        ),
        block_ids=[BlockId(20 * index + number) for number in range(num_blocks)],
        num_shared_blocks=num_shared,
        computed=computed,
        scheduled=scheduled,
        generated=[1000 * index + 500 + number for number in range(num_generated)],
        source_slot=None if source_slot is None else SlotId(source_slot),
        reserved=[ReservedState(position, SlotId(slot)) for position, slot in (reserved or {}).items()],
        drafts=tuple(1000 * index + 900 + number for number in range(num_drafts)),
    )


def decoding(
    index: int, *, prompt_len: int = 5, num_generated: int = 1, num_drafts: int = 0, **settings: object
) -> RunningRequest:
    computed = prompt_len + num_generated - 1
    return running_request(
        index,
        prompt_len=prompt_len,
        computed=computed,
        scheduled=1 + num_drafts,
        num_generated=num_generated,
        num_drafts=num_drafts,
        **settings,  # type: ignore[arg-type]
    )


def lay_out(requests: list[RunningRequest], device: str) -> StepBatch:
    return lay_out_step(requests, StepBuffers(LIMITS, device), GEOMETRY)


def random_decode(index: int, draw: random.Random, most_drafts: int) -> RunningRequest:
    prompt_len, num_generated = draw.randint(1, 20), draw.randint(1, 20)
    num_drafts = draw.randint(0, most_drafts)
    computed = prompt_len + num_generated - 1
    boundary = (computed // BLOCK + 1) * BLOCK
    is_reserved = boundary <= computed + 1 + num_drafts and draw.random() < 0.7
    return decoding(
        index,
        prompt_len=prompt_len,
        num_generated=num_generated,
        num_drafts=num_drafts,
        accepted=draw.randint(1, 1 + MOST_DRAFTS),
        reserved={boundary: 200 + index} if is_reserved else None,
        sampling=random_sampling(draw),
    )


def random_sampling(draw: random.Random) -> SamplingSettings:
    return SamplingSettings(
        temperature=draw.choice([0.0, 0.5, 1.0]),
        top_k=draw.choice([0, 1, 7]),
        top_p=draw.choice([0.0, 0.25]),
        seed=draw.randint(0, 2**64 - 1),
    )
