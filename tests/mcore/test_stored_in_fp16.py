"""fp16 states: prefix hits, drafts, batches and tiers change no bit of a state at a block boundary, and no token."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_mamba_cache.mcore import linear
from megatron_mamba_cache.models.architecture import GatedDeltaSizes
from megatron_mamba_cache.speculation.drafter import Drafter
from tests.mcore import random_workloads
from tests.mcore.engine_runs import EngineRun, Hybrid, OracleTally, cache_config, tiny_hybrid
from tests.mcore.noisy_drafter import NoisyDrafter
from tests.mcore.random_workloads import FLAVOURS, MODEL_FORMS, Workload, make_workload, run_workload, undisturbed
from tests.mcore.test_stored_in_bf16 import TokenByToken

SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {},
    "gated delta": {"gated": True, "gated_delta": GatedDeltaSizes(2, 4, 16, 24)},
}
RING_LEN = 8
NUM_TOKENS = 40
Results = tuple[list[list[int]], dict[bytes, Tensor]]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's GEMMs sum few tokens and many in other orders")


def states_by_key(run: EngineRun) -> dict[bytes, Tensor]:
    """Return copies of the cached states on the device by their keys."""
    cache, pool = run.context.cache, run.context.memory.state_pool
    states = next(tensor.name for tensor in pool.groups[0].tensors if tensor.is_matrix)
    slots = {cache.kv.key_of(block): cache.slots.slot_of(block) for block in cache.slots.cached_blocks()}
    return {key: pool.tensor(states)[:, slot].clone() for key, slot in slots.items() if key and slot is not None}


def served(subject: Hybrid, prompts: list[list[int]], *, at_once: bool, **settings: Any) -> Results:
    """Return the replies and the states at block boundaries."""
    drafter: Drafter | None = settings.pop("drafter", None)
    block = 2 * subject.sizes.ssm_chunk_size
    fixed: dict[str, Any] = {
        "block_size_tokens": block,
        "max_tokens": 3 * block,
        "ssm_state_dtype": "fp16",
        "boundary_stride": "all",
    }
    config = cache_config(subject.sizes, **(fixed | {"decode_checkpoints": "all", "fold_every": RING_LEN} | settings))
    run = EngineRun.start(subject, config, drafter=drafter)
    for request, prompt in enumerate(prompts):
        run.add(request, prompt, NUM_TOKENS)
        if not at_once or not request:
            run.finish()
    run.finish()
    if at_once:
        assert run.counters.prompt_tokens_skipped
    return [run.tokens(request) for request in range(len(prompts))], states_by_key(run)


@on_cpu
@pytest.mark.parametrize("draft_states", ["replay", "window"])
@pytest.mark.parametrize("recurrence", SIZES)
def test_hits_drafts_and_batches_change_no_token_and_no_state(
    recurrence: str, draft_states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt alone in a new engine, token by token, against all in one engine, with hits and drafts."""
    monkeypatch.setattr(layers, "torch", TokenByToken(torch))
    monkeypatch.setattr(linear, "F", TokenByToken(F))
    subject, rng = tiny_hybrid(pattern="MMM*", ssm_chunk_size=8, **SIZES[recurrence]), random.Random(5)
    vocab = subject.sizes.vocab_size
    shared = [rng.randrange(vocab) for _ in range(70)]
    prompts = [shared[:length] + [rng.randrange(vocab) for _ in range(9)] for length in (70, 33, 64, 50)]
    prompts += [[rng.randrange(vocab) for _ in range(length)] for length in (17, 45)]  # after which a step is full
    alone = [served(subject, [prompt], at_once=False, draft_states=draft_states) for prompt in prompts]
    texts = {request: [*prompts[request], *reply[0]] for request, (reply, _) in enumerate(alone)}
    for num_drafts in (0, 3):
        drafter = NoisyDrafter(texts, accuracy=0.8, vocab_size=vocab, seed=num_drafts) if num_drafts else None
        settings = {"draft_states": draft_states, "num_speculative_tokens": num_drafts, "drafter": drafter}
        replies, states = served(subject, prompts, at_once=True, **settings)
        assert replies == [reply[0] for reply, _ in alone]
        num_equal = 0
        for _, expected in alone:
            assert all(state.dtype == torch.float16 for state in expected.values())
            for key in expected.keys() & states.keys():
                assert torch.equal(expected[key], states[key])
                num_equal += 1
        assert num_equal >= 20


def with_settings(work: Workload, **settings: Any) -> Workload:
    """Return a workload with other settings of its engine."""
    return replace(work, config=replace(work.config, **settings))


CASES = [
    ("roomy", "dense", 3, 0),
    ("few_states", "gated delta", 0, 1),
    ("host_tier", "dense", 0, 1),
    ("disk_tier", "gated delta", 3, 0),
]


@pytest.mark.parametrize(("name", "form", "num_drafts", "first_seed"), CASES)
@pytest.mark.parametrize("num_seeds", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_tokens_equal_those_of_an_uncached_engine_with_fp16_states_in_random_workloads(
    name: str, form: str, num_drafts: int, first_seed: int, num_seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle has fp64 states; the uncached engine replaces it. Even seeds replay drafts."""
    monkeypatch.setattr(random_workloads, "assert_replies_are_the_oracles", lambda *_: OracleTally())
    num_skipped = 0
    for seed in range(first_seed, first_seed + num_seeds):
        work = make_workload(FLAVOURS[name], seed, num_drafts, models=MODEL_FORMS[form], replays=seed % 2 == 0)
        work = with_settings(work, ssm_state_dtype="fp16")
        plain = with_settings(
            undisturbed(work),
            ssm_state_dtype="fp16",
            prefix_caching=False,
            draft_states=work.config.draft_states,
        )
        expected = run_workload(plain).texts
        vocab = work.subject.sizes.vocab_size
        drafter = NoisyDrafter(expected, accuracy=0.8, vocab_size=vocab, seed=seed, varies=True) if num_drafts else None
        outcome = run_workload(work, drafter)
        assert outcome.texts == expected
        num_skipped += outcome.seen["prompt_tokens_skipped"]
    assert num_skipped
