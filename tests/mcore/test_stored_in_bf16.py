"""Replayed states stored in bf16 do not depend on the number of drafts, and neither do tokens."""

import random
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_mamba_cache.mcore import linear
from megatron_mamba_cache.policy.draft_states import ReplayStates
from megatron_mamba_cache.speculation.drafter import Drafter

from .engine_runs import EngineRun, Hybrid, cache_config, tiny_hybrid
from .noisy_drafter import NoisyDrafter

MAMBA_LAYERS = "MMM*"  # what a layer reads depends on the states of the layers before it
States = dict[bytes, tuple[Tensor, Tensor]]


class TokenByToken:
    """A module that computes its GEMMs one token at a time, so that bits do not depend on the step's tokens."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.matmul(x, weight.t())

    @staticmethod
    def matmul(x: Tensor, weight: Tensor) -> Tensor:
        products = [torch.matmul(token[None], weight) for token in x.reshape(-1, x.shape[-1])]
        return torch.cat(products).reshape(*x.shape[:-1], -1) if products else torch.matmul(x, weight)


@given(ring_len=st.sampled_from((4, 8, 16, 32)), computed=st.integers(0, 200), limit=st.integers(0, 8))
@example(ring_len=4, computed=3, limit=8)
def test_drafting_stops_before_the_state_is_stored_in_bf16(ring_len: int, computed: int, limit: int) -> None:
    drafts = ReplayStates(1, rounding_len=ring_len).most_drafts(computed, limit)
    assert 0 <= drafts <= limit and computed // ring_len == (computed + drafts) // ring_len
    assert drafts == limit or (computed + drafts + 1) % ring_len == 0, "no fewer than need be"
    assert ReplayStates(1).most_drafts(computed, limit) == limit


def served(
    subject: Hybrid, ring_len: int, drafter: Drafter | None, num_drafts: int, prompts: list[list[int]]
) -> tuple[list[list[int]], States]:
    """Return the replies, and the states at block boundaries by their keys."""
    config = cache_config(
        subject.sizes,
        block_size_tokens=32,
        draft_states="replay",
        fold_every=ring_len,
        num_speculative_tokens=num_drafts,
        decode_checkpoints="all",
        ssm_state_dtype="bf16",
    )
    run = EngineRun.start(subject, config, drafter=drafter)
    for request, prompt in enumerate(prompts):
        run.add(request, prompt, 70)
    run.finish()
    cache, pool = run.context.cache, run.context.memory.state_pool
    window = run.context.memory.state_pool.groups[0].tensors[0].shape[0]
    slots = {cache.kv.key_of(block): cache.slots.slot_of(block) for block in cache.slots.cached_blocks()}
    states = {
        key: (pool.tensor("conv")[:, slot, :window].clone(), pool.tensor("ssm")[:, slot].clone())
        for key, slot in slots.items()
        if key is not None and slot is not None
    }
    return [run.tokens(request) for request in range(len(prompts))], states


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's kernels sum one token and several in their own orders")
@pytest.mark.parametrize("ring_len", [4, 8, 16])
def test_drafts_change_no_token_or_state_with_bf16_states(ring_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "torch", TokenByToken(torch))
    monkeypatch.setattr(linear, "F", TokenByToken(F))
    subject, rng = tiny_hybrid(pattern=MAMBA_LAYERS, ssm_chunk_size=8), random.Random(ring_len)
    vocab = subject.sizes.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in (5, 23)]
    replies, states = served(subject, ring_len, None, 0, prompts)
    texts = {request: [*prompts[request], *reply] for request, reply in enumerate(replies)}
    assert len(states) >= 4 and all(state.dtype == torch.bfloat16 for _, state in states.values())
    for num_drafts in (3, 5, 7):
        drafter = NoisyDrafter(texts, accuracy=0.9, vocab_size=vocab, seed=num_drafts)
        with_drafts, same = served(subject, ring_len, drafter, num_drafts, prompts)
        assert with_drafts == replies
        assert same.keys() == states.keys()
        for key, (conv, ssm) in states.items():
            assert torch.equal(same[key][0], conv) and torch.equal(same[key][1], ssm)
