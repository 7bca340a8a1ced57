"""Recorded routes of experts equal those of the oracle's forward pass over the whole text, in any workload."""

import io
import random
from base64 import b64decode
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord

from megatron_mamba_cache.mcore.request_states import ROUTED_EXPERTS
from megatron_mamba_cache.step import routed_experts
from megatron_mamba_cache.step.buffers import HostCopy
from megatron_mamba_cache.step.routed_experts import RoutedExperts, RouteTable
from tests.mcore.engine_runs import EngineRun, add_fields, cache_config, greedy, some_tokens, tiny_hybrid
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.random_workloads import EXPERT_MODELS, FLAVOURS, make_workload, run_workload
from tests.mcore.routes import compare_routes
from tests.mcore.workload_drafters import make_drafter, make_mtp_drafter

SIZES = EXPERT_MODELS[0]
MOST_UNSURE = 0.2
"""The largest share of a workload's tokens that follow a choice which rounding may decide."""


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


def recording_run(**settings: object) -> EngineRun:
    """Return an engine that records routes, for a model with two MoE layers."""
    subject = tiny_hybrid(**SIZES)
    return EngineRun.start(subject, cache_config(subject.sizes, record_routes=True, **settings))


def test_prefix_hit_returns_the_routes_of_the_tokens_it_skips() -> None:
    run = recording_run()
    prompt = some_tokens(70)
    run.run(0, prompt)
    assert run.run(1, [*prompt, 5, 6, 7]) < 30
    compare_routes(run)
    first, second = (run.finished[request_id].routed_experts for request_id in (0, 1))
    assert np.array_equal(first[:64], second[:64])


def test_routes_stay_readable_after_their_blocks_are_reused_and_the_engine_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routed_experts, "_BLOCKS_AT_ONCE", 2)
    run = recording_run(kv_blocks=12, max_sequence_length=160)
    for request_id in range(4):
        run.run(request_id, some_tokens(130, seed=request_id), 20)
    run.engine.suspend()
    run.engine.resume()
    run.run(4, some_tokens(130, seed=9), 20)
    run.engine.close()
    compare_routes(run)
    assert run.finished[0].routed_experts is run.finished[0].routed_experts


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("token", [0, 17, 75])
def test_planted_wrong_expert_is_found(token: int, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recording_run()
    keep = RouteTable.keep

    def plant(table: RouteTable, requests: list) -> None:
        for request in requests:
            block, offset = request.block_ids[token // table._table.shape[1]], token % table._table.shape[1]
            table._table[block, offset, layer, 0] = (table._table[block, offset, layer, 0] + 1) % 8
        keep(table, requests)

    run.run(0, some_tokens(70))
    compare_routes(run)
    monkeypatch.setattr(RouteTable, "keep", plant)
    run.run(1, some_tokens(70))
    with pytest.raises(AssertionError, match=rf"request 1: tokens \[{token}\]"):
        compare_routes(run)


def test_routes_are_none_unless_recorded_and_wanted() -> None:
    run = recording_run()
    run.run(0, some_tokens(20), add_fields(greedy(4), returns_routes=False))
    run.run(1, [], greedy(4))  # fails
    run.run(2, some_tokens(20), add_fields(greedy(4), returns_routes=True))
    assert [run.finished[request_id].routed_experts is None for request_id in range(3)] == [True, True, False]
    without = EngineRun.start(run.subject)
    without.run(0, some_tokens(20))
    without.run(1, some_tokens(20), add_fields(greedy(4), returns_routes=True))
    assert without.finished[0].routed_experts is None
    (event, *_) = without.finished[1].events
    assert "--record-routes" in str(event.payload)


def test_models_without_experts_are_refused_in_one_line() -> None:
    subject = tiny_hybrid()
    with pytest.raises(ValueError, match="the model has no MoE layers; leave --record-routes out") as error:
        EngineRun.start(subject, cache_config(subject.sizes, record_routes=True))
    assert "\n" not in str(error.value)
    shape = replace(tiny_hybrid(**SIZES).shape, waits_for_experts=True)
    with pytest.raises(ValueError, match="Megatron's own MoELayer"):
        shape.check(cache_config(subject.sizes, record_routes=True))


def test_recorded_routes_are_part_of_a_blocks_bytes_and_of_its_keys() -> None:
    subject = tiny_hybrid(**SIZES)
    plain = cache_config(subject.sizes).resolved()
    recorded, shape = replace(plain, record_routes=True), subject.shape
    of_routes = plain.block_size_tokens * 2 * 2 * 2  # two layers, two experts, two bytes
    assert shape.unit_bytes(recorded).block == shape.unit_bytes(plain).block + of_routes
    assert shape.cache_fingerprint(recorded) != shape.cache_fingerprint(plain)


@given(st.data())
def test_copied_routes_are_those_of_the_requests_blocks_in_order(data: st.DataObject) -> None:
    block_size, num_blocks, at_once = (data.draw(st.integers(1, most)) for most in (5, 9, 4))
    table = np.arange(num_blocks * block_size * 2, dtype=np.int16).reshape(num_blocks, block_size, 1, 2)
    blocks = data.draw(st.permutations(range(num_blocks)))
    num_known = data.draw(st.integers(0, num_blocks * block_size))
    length = num_known + data.draw(st.integers(1, 3))
    parts = torch.tensor(blocks[: -(-num_known // block_size)], dtype=torch.int64).split(at_once)
    copies = [HostCopy(torch.from_numpy(table)[part]) for part in parts]
    found = RoutedExperts(copies, num_known, (length, 1, 2)).array()
    expected = np.concatenate([table[block] for block in blocks])[:num_known]
    assert np.array_equal(found[:num_known], expected) and (found[num_known:] == -1).all() and len(found) == length


def test_serialized_reply_to_a_coordinator_has_the_routes() -> None:
    run = recording_run()
    run.engine.add_request(0, some_tokens(20), greedy(4))
    records: list[Any] = []
    while not records:
        records = run.engine.step_modern()["finished_request_records"]
    run.engine._annotate(records[0], 0)
    sent = msgpack.unpackb(msgpack.packb(records[0].serialize()))
    found = getattr(DynamicInferenceRequestRecord.deserialize(sent)[0].sampling_params, ROUTED_EXPERTS)
    assert np.array_equal(np.load(io.BytesIO(b64decode(found))), records[0].merge().routed_experts)
