"""Sampled text has the same distribution with and without a draft model, over many short requests."""

from functools import cache

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams
from torch import Tensor

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.models.drafting.draft_model import DraftModelDrafter
from megatron_mamba_cache.speculation.drafter import Drafter
from tests.mcore.checked_draft_model import CheckedDraftModel
from tests.mcore.engine_runs import Hybrid, cache_config, tiny_hybrid
from tests.mcore.graph_stand_ins import capture_without_cuda

VOCAB, NUM_TOKENS, NUM_REQUESTS, BATCH = 8, 6, 600, 300
SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.4, "top_p": 0.8},
)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "mamba_num_heads": 2,
    "mamba_num_groups": 1,
    "pattern": "M*",
    "init_std": 0.6,
}
ROOM = {"max_requests": BATCH, "max_tokens": 2000, "max_sequence_length": 32, "kv_blocks": 2 * BATCH}


def start_drafter(kind: type[CheckedDraftModel] = CheckedDraftModel) -> CheckedDraftModel:
    """Return a draft model that is similar to the model, but not equal."""
    return kind.start(tiny_hybrid(**SIZES | {"pattern": "*M", "seed": 1}), cached_states=2 * BATCH, **ROOM)


@cache
def plain_texts(num_requests: int) -> Tensor:
    """Return the tokens of requests without drafts, in the format of `sampled_texts`."""
    return sampled_texts(tiny_hybrid(**SIZES), None, num_requests, first_seed=10_000)[0]


def sampled_texts(subject: Hybrid, drafter: Drafter | None, num_requests: int, first_seed: int) -> tuple[Tensor, float]:
    """Return the tokens [settings, requests, NUM_TOKENS] of requests, and the share of accepted drafts."""
    num_drafts = 3 if drafter else 0
    states = {"cached_states": (1 + num_drafts) * BATCH, **ROOM}
    config = cache_config(subject.sizes, num_speculative_tokens=num_drafts, adaptive_drafts=False, **states)
    engine = build_engine(subject.model, config, drafter=drafter)
    for request_id in range(len(SETTINGS) * num_requests):
        params = SamplingParams(
            **SETTINGS[request_id % len(SETTINGS)], num_tokens_to_generate=NUM_TOKENS, termination_id=-1
        )
        engine.add_request(request_id, [3], params, seed=first_seed + request_id)
    texts = {}
    while engine.requests:
        for record in engine.step_modern()["finished_request_records"]:
            request = record.merge()
            texts[request.request_id] = list(request.generated_tokens)
    tokens = torch.tensor([texts[request_id] for request_id in sorted(texts)])
    counters = engine.context.counters
    accepted = counters.accepted_tokens / max(1, counters.draft_tokens)
    return tokens.reshape(num_requests, len(SETTINGS), NUM_TOKENS).transpose(0, 1), accepted


def p_value(first: Tensor, second: Tensor) -> float:
    """Return the chi-square p-value of two samples [n, tokens] under one distribution.

    Cells with small counts are merged.
    """
    counts = torch.stack([_count_cells(sample) for sample in (first, second)])
    counts = counts[:, counts.sum(dim=0).argsort()]
    groups = (counts.sum(dim=0).cumsum(0) / 20).long().unique(return_inverse=True)[1]
    merged = torch.zeros(2, int(groups.max()) + 1, dtype=torch.float64).index_add_(1, groups, counts)
    merged = merged[:, merged.sum(dim=0) > 0]
    expected = merged.sum(dim=0) * merged.sum(dim=1, keepdim=True) / merged.sum()
    statistic = ((merged - expected).square() / expected).sum()
    degrees = torch.tensor(merged.shape[1] - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2)) if degrees else 1.0


def _count_cells(sample: Tensor) -> Tensor:
    powers = VOCAB ** torch.arange(sample.shape[1])
    return torch.bincount((sample * powers).sum(dim=1), minlength=VOCAB ** len(powers)).double()


def p_values(first: Tensor, second: Tensor) -> list[float]:
    """Return the probabilities of single tokens and of pairs at several positions, for each of the settings."""
    spans = [slice(at, at + count) for count in (1, 2) for at in range(1, NUM_TOKENS - count + 1)]
    return [p_value(first[index][:, span], second[index][:, span]) for index in range(len(SETTINGS)) for span in spans]


@pytest.mark.long
@pytest.mark.parametrize("num_graphs", [0, 9])
@pytest.mark.parametrize("num_requests", [NUM_REQUESTS, pytest.param(2 * NUM_REQUESTS, marks=pytest.mark.slow)])
def test_draft_model_does_not_change_the_output_distribution(
    num_requests: int, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_without_cuda(monkeypatch)
    monkeypatch.setattr(CheckedDraftModel, "num_cuda_graphs", num_graphs)
    subject, drafter = tiny_hybrid(**SIZES), start_drafter()
    drafted, accepted = sampled_texts(subject, drafter, num_requests, first_seed=90_000)
    assert drafted.numel() >= 20_000 * num_requests // (2 * NUM_REQUESTS) and 0.1 < accepted < 0.9
    assert min(p_values(plain_texts(num_requests), drafted)) > 0.001
    drafter.assert_nothing_held()
    assert bool(drafter.counters.graph_steps) == bool(num_graphs)


@pytest.mark.long
def test_statistical_test_detects_wrong_draft_distributions() -> None:
    class Liar(CheckedDraftModel):
        propose, forget = DraftModelDrafter.propose, DraftModelDrafter.forget  # the run above checks the bookkeeping

        def _sample(self, requests):  # type: ignore[no-untyped-def]
            sampled = super()._sample(requests)
            sampled.probabilities.mul_(0.5).add_(0.5 / VOCAB)
            return sampled

    drafted, _ = sampled_texts(tiny_hybrid(**SIZES), start_drafter(Liar), NUM_REQUESTS, first_seed=90_000)
    assert min(p_values(plain_texts(NUM_REQUESTS), drafted)) < 1e-6
