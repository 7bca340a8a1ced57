"""Recorded routes of experts equal those of the oracle's forward pass over the whole text, in any workload."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.mcore.engine_runs import EngineRun
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.random_workloads import EXPERT_MODELS, FLAVOURS, make_workload, run_workload
from tests.mcore.workload_drafters import make_drafter, make_mtp_drafter
from tests.oracle import ROUTING_MARGIN

MOST_UNSURE = 0.2
"""The largest share of a workload's tokens that follow a choice which rounding may decide."""


def compare_routes(run: EngineRun) -> tuple[int, int]:
    """Assert that the finished requests' routes are the oracle's; return the numbers of compared and all tokens."""
    num_compared = num_tokens = 0
    for request_id, request in run.finished.items():
        text, found = run.prompts[request_id] + run.tokens(request_id), request.routed_experts
        expected, gaps = run.subject.oracle.experts(text)
        assert found.dtype == np.int16 and found.shape == expected.shape
        assert (found[-1] == -1).all() and (found[:-1] >= 0).all()
        sure = (gaps >= ROUTING_MARGIN).cpu().numpy()[:-1]
        differs = (np.sort(found[:-1], -1) != expected.cpu().numpy()[:-1]).any((1, 2)) & sure
        assert not differs.any(), f"request {request_id}: tokens {np.flatnonzero(differs)} of {len(text)} differ"
        num_compared, num_tokens = num_compared + int(sure.sum()), num_tokens + len(sure)
    return num_compared, num_tokens


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps be captured, and so overlap, on any machine."""
    capture_without_cuda(monkeypatch)


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        pytest.param("plain", range(1), id="plain"),
        pytest.param("drafts", range(1, 2), id="drafts"),
        pytest.param("mtp", range(2, 3), id="mtp"),
        pytest.param("plain", range(4, 20), id="plain-long", marks=pytest.mark.slow),
        pytest.param("drafts", range(20, 36), id="drafts-long", marks=pytest.mark.slow),
        pytest.param("mtp", range(36, 52), id="mtp-long", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", FLAVOURS)
def test_routes_of_random_workloads_are_the_oracles(name: str, kind: str, seeds: range) -> None:
    num_compared = num_tokens = 0
    for seed in seeds:
        rng = random.Random(f"routes {name} {seed}")
        work = make_workload(
            FLAVOURS[name],
            3000 + seed,
            0 if kind == "plain" else rng.randrange(1, 4),
            models=EXPERT_MODELS,
            replays=seed % 4 >= 2,
            has_head=kind == "mtp",
            sampled_share=0.3,
            record_routes=True,
        )
        work = replace(work, config=replace(work.config, num_cuda_graphs=3 * (seed % 3 < 2)))
        drafter = None if kind == "plain" else (make_mtp_drafter if kind == "mtp" else make_drafter)(rng, work)
        compared, tokens = compare_routes(run_workload(work, drafter).run)
        num_compared, num_tokens = num_compared + compared, num_tokens + tokens
    assert num_compared >= (1 - MOST_UNSURE) * num_tokens
