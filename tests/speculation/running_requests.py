"""Running requests for tests of drafters, which read only the text."""

from collections.abc import Sequence

import numpy as np

from megatron_mamba_cache.policy.block_hashing import BlockKeyChain
from megatron_mamba_cache.policy.identifiers import SlotId
from megatron_mamba_cache.policy.request_settings import RequestSpec, SamplingSettings
from megatron_mamba_cache.policy.requests import RunningRequest, StateCursor


def request_of(
    prompt: Sequence[int],
    generated: Sequence[int] = (),
    request_id: int = 0,
    *,
    sampling: SamplingSettings | None = None,
    tenant: str = "",
) -> RunningRequest:
    """Return a running request with these prompt and generated tokens."""
    tokens = np.array(prompt, dtype=np.int64)
    spec = RequestSpec(request_id, tokens, 1 << 30, sampling or SamplingSettings(), tenant)
    return RunningRequest(
        spec=spec,
        chain=BlockKeyChain(bytes(32), 4),
        epoch=0,
        age=0,
        cursor=StateCursor(SlotId(0)),
        block_ids=[],
        num_shared_blocks=0,
        computed=0,
        generated=list(generated),
    )
