"""New weights during a suspend, as in reinforcement learning: no old state is found, no token lost.

Where there is no CUDA, graphs are padded steps that are computed again, over the memory that parameters had when they
were captured. Memory that parameters have left holds NaN.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_mamba_cache.models.random_hybrid import random_hybrid_model
from megatron_mamba_cache.policy.boundary_journal import BoundaryChanges
from megatron_mamba_cache.replicas.cache_reports import CacheReports
from megatron_mamba_cache.replicas.prompt_keys import KeySalt
from tests.mcore.engine_runs import EngineRun, Hybrid, cache_config, hybrid, some_tokens, tiny_sizes
from tests.mcore.graph_stand_ins import capture_without_cuda

pytestmark = pytest.mark.usefixtures("either_form")

BLOCK = 16
PROMPT_LEN = 50
FOUND = PROMPT_LEN // BLOCK * BLOCK


@dataclass(slots=True)
class Refit:
    """An engine whose model changes from one set of weights to the next, with an oracle for each."""

    run: EngineRun
    versions: tuple[Hybrid, ...]
    present: int = 0
    checked: set[int] = field(default_factory=set)

    @classmethod
    def start(cls, patch: pytest.MonkeyPatch, **settings: object) -> "Refit":
        """Serve the first version, with graphs on any machine."""
        versions = tuple(hybrid(tiny_sizes(seed=seed)) for seed in (1, 2, 3))
        model = random_hybrid_model(versions[0].sizes)  # a model of its own: its weights change
        capture_without_cuda(patch, model)
        subject = Hybrid(versions[0].sizes, model, versions[0].oracle, versions[0].shape)
        sizes = {"block_size_tokens": BLOCK, "num_cuda_graphs": 3, "cuda_graph_prefill_tokens": 40}
        return cls(EngineRun.start(subject, cache_config(subject.sizes, **(sizes | settings))), versions)

    def load(self, version: int) -> None:
        """Copy a version's weights into the current parameters."""
        self.run.subject.model.load_state_dict(self.versions[version].model.state_dict())
        self._are_those_of(version)

    def replace(self, version: int) -> None:
        """Replace the parameters by new ones with the weights of a version."""
        weights = self.versions[version].model.state_dict()
        for name, parameter in list(self.run.subject.model.named_parameters()):
            path, _, last = name.rpartition(".")
            fresh = torch.nn.Parameter(weights[name].clone(), requires_grad=parameter.requires_grad)
            setattr(self.run.subject.model.get_submodule(path), last, fresh)
            parameter.data.fill_(torch.nan)
        self._are_those_of(version)

    def assert_exact(self, *request_ids: int) -> None:
        """Assert that whole requests have the tokens of the current weights, and that nothing is held."""
        self.run.assert_matches_oracle(request_ids).assert_few_stops()
        self.run.assert_nothing_held()

    def assert_continued(self, request_id: int, before: list[int], num_tokens: int) -> None:
        """Assert that a request kept its tokens and continued with those of the current weights."""
        tokens = self.run.tokens(request_id)
        assert tokens[: len(before)] == before and len(tokens) == num_tokens
        prompt = self.run.prompts[request_id] + before
        check = self.run.subject.oracle.check_greedy(prompt, tokens[len(before) :], 1e-5)
        assert check.first_mismatch is None and check.num_compared > 0

    def _are_those_of(self, version: int) -> None:
        old, new = self.run.subject, self.versions[version]
        self.run.subject = Hybrid(old.sizes, old.model, new.oracle, old.shape)


class ReportedKeys:
    """A coordinator that records its reports."""

    def __init__(self) -> None:
        self.reports: list[tuple[BoundaryChanges, KeySalt | None]] = []

    def report_keys(self, changes: BoundaryChanges, salt: KeySalt | None) -> None:
        self.reports.append((changes, salt))


@pytest.fixture(params=[False, True], ids=["dropped", "resident"])
def refit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Refit]:
    """Serve with either kind of pools; check the engine after every test."""
    found = Refit.start(monkeypatch, resident_pools=request.param)
    yield found
    found.run.context.check_integrity()


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refit]:
    """Serve with resident pools."""
    found = Refit.start(monkeypatch, resident_pools=True)
    yield found
    found.run.context.check_integrity()


def _resume_with_version(refit: Refit) -> None:
    refit.run.engine.suspend()
    refit.load(1)
    refit.run.engine.resume(weights_version="step-1")


def _flush_while_suspended(refit: Refit) -> None:
    refit.run.engine.suspend()
    refit.run.engine.flush("step-1")
    refit.load(1)
    refit.run.engine.resume()


def _flush_without_a_suspend(refit: Refit) -> None:
    refit.load(1)
    refit.run.engine.flush("step-1")


def _replace_and_resume(refit: Refit) -> None:
    refit.run.engine.suspend()
    refit.replace(1)
    refit.run.engine.resume("step-1")


def _replace_and_flush(refit: Refit) -> None:
    refit.replace(1)
    refit.run.engine.flush("step-1")


def _train_in_between(refit: Refit) -> None:
    refit.run.engine.suspend()
    refit.run.subject.model.train()
    refit.load(1)
    refit.run.engine.resume("step-1")


WAYS = [
    _resume_with_version,
    _flush_while_suspended,
    _flush_without_a_suspend,
    _replace_and_resume,
    _replace_and_flush,
    _train_in_between,
]


@pytest.mark.parametrize("change", WAYS)
def test_states_cached_with_old_weights_are_not_reused(change: Callable[[Refit], None], refit: Refit) -> None:
    run = refit.run
    run.run(0, some_tokens(PROMPT_LEN))
    assert run.run(1, some_tokens(PROMPT_LEN)) == PROMPT_LEN - FOUND
    refit.assert_exact(0, 1)
    change(refit)
    assert run.context.weights_version == "step-1"
    before = run.counters.graph_steps
    assert run.run(2, some_tokens(PROMPT_LEN)) == PROMPT_LEN
    assert run.run(3, some_tokens(PROMPT_LEN)) == PROMPT_LEN - FOUND
    assert [run.engine.cached_tokens(request_id) for request_id in (2, 3)] == [0, FOUND]
    assert run.counters.graph_steps > before
    assert run.tokens(2) != run.tokens(0)
    refit.assert_exact(2, 3)


@pytest.mark.parametrize(
    ("num_drafts", "steps_before"),
    [
        pytest.param(num_drafts, count, marks=() if (num_drafts, count) in ((0, 7), (3, 1)) else pytest.mark.long)
        for num_drafts in (0, 3)
        for count in (1, 3, 7)
    ],
)
@pytest.mark.parametrize("resident_pools", [False, True], ids=["dropped", "resident"])
def test_running_requests_continue_with_the_new_weights(
    resident_pools: bool, steps_before: int, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"resident_pools": resident_pools, "num_speculative_tokens": num_drafts, "max_requests": 2}
    refit = Refit.start(monkeypatch, **settings)
    run = refit.run
    lengths = [60, 50, 40, 30]  # the last two wait for the first
    for request_id, num_tokens in enumerate(lengths):
        run.add(request_id, some_tokens(30 + request_id, seed=request_id), num_tokens)
    for _ in range(steps_before):
        run.step()
    run.engine.suspend()
    generated = [
        [token for part in run.engine.requests[i].record.requests for token in part.generated_tokens] for i in range(4)
    ]
    assert generated[0] and not generated[3]
    refit.load(1)
    run.engine.resume("step-1")
    assert not any(state.cached_tokens for state in run.engine._states.values())
    run.finish()
    for request_id, num_tokens in enumerate(lengths):
        refit.assert_continued(request_id, generated[request_id], num_tokens)
    assert run.run(4, run.prompts[2]) == BLOCK  # what waited meanwhile is found under the new version
    refit.assert_exact(4)


# Graphs.


def test_weights_loaded_in_place_keep_their_captured_graphs(resident: Refit, caplog: pytest.LogCaptureFixture) -> None:
    run = resident.run
    memory, graphs = run.context.memory, run.context.graphs
    for version in (1, 2):
        run.engine.suspend()
        assert run.context.memory is memory and run.context.graphs is graphs
        resident.load(version)
        run.engine.resume(f"step-{version}")
        run.run(version, some_tokens(PROMPT_LEN))
        resident.assert_exact(version)
    assert run.context.memory is memory and run.context.graphs is graphs
    assert run.counters.graph_steps and "captured again" not in caplog.text


def test_graphs_are_captured_again_when_suspend_frees_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    refit = Refit.start(monkeypatch)
    context, memory, graphs = refit.run.context, refit.run.context.memory, refit.run.context.graphs
    refit.run.engine.suspend()
    assert context.graphs is None and not context.is_tensor_state_allocated
    refit.load(1)
    refit.run.engine.resume("step-1")
    assert context.memory is not memory and context.graphs not in (None, graphs)


def _move_one(model: torch.nn.Module) -> str:
    norm = model.decoder.final_norm
    old, norm.weight = norm.weight, torch.nn.Parameter(norm.weight.detach().clone())
    old.data.fill_(torch.nan)
    return "decoder.final_norm.weight has moved"


def _move_the_data_of_one(model: torch.nn.Module) -> str:
    weight = model.output_layer.weight
    old, weight.data = weight.data, weight.data.clone()  # as weights that were sent to the CPU come back
    old.fill_(torch.nan)
    return "output_layer.weight has moved"


def _turn_one(model: torch.nn.Module) -> str:
    weight = model.decoder.layers[1].self_attention.linear_proj.weight  # a square
    values = weight.data.clone()
    weight.data = weight.data.t()  # where it was, in another order
    weight.data.copy_(values)
    return "self_attention.linear_proj.weight has moved"


def _add_a_buffer(model: torch.nn.Module) -> str:
    model.decoder.register_buffer("scale", torch.ones(1))
    return "decoder.scale is new"


@pytest.mark.parametrize("is_suspended", [True, False])
@pytest.mark.parametrize("move", [_move_one, _move_the_data_of_one, _turn_one, _add_a_buffer])
def test_graphs_are_captured_again_when_weights_move_in_memory(
    move: Callable[[torch.nn.Module], str], is_suspended: bool, resident: Refit, caplog: pytest.LogCaptureFixture
) -> None:
    run, graphs = resident.run, resident.run.context.graphs
    if is_suspended:
        run.engine.suspend()
        change = move(run.subject.model)
        run.engine.flush()  # weights may move on until the resume
        assert run.context.graphs is graphs
        run.engine.resume()
    else:
        change = move(run.subject.model)
        run.engine.flush()
    assert run.context.graphs not in (None, graphs)
    messages = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [message for message in messages if "captured again" in message and change in message]
    captured, before = run.context.graphs, run.counters.graph_steps
    run.engine.flush()
    assert run.context.graphs is captured
    run.run(0, some_tokens(PROMPT_LEN))
    assert run.counters.graph_steps > before
    resident.assert_exact(0)


def test_capturing_graphs_again_between_steps_loses_no_token(resident: Refit) -> None:
    run, graphs = resident.run, resident.run.context.graphs
    run.add(0, some_tokens(PROMPT_LEN), 30)
    for _ in range(6):
        run.step()
    resident.replace(0)  # the same weights at another address
    run.engine.flush()
    assert run.context.graphs is not graphs
    run.finish()
    assert len(run.tokens(0)) == 30
    resident.assert_exact(0)


def test_rotary_tables_read_by_graphs_are_not_freed(resident: Refit) -> None:
    """Forwards of many other lengths, as in training, evict the engine's table from Megatron's cache."""
    table = resident.run.subject.model.rotary_pos_emb
    assert isinstance(table, RotaryEmbedding)
    held = resident.run.context.graphs._tables
    assert held and all(tensor.shape[0] == resident.run.context.max_sequence_length for tensor in held.values())
    for length in range(1, 80):
        table(length)
    found = table(resident.run.context.max_sequence_length, packed_seq=False)
    assert id(found) not in held  # it was made anew, and the graphs still have theirs
    resident.run.run(0, some_tokens(PROMPT_LEN))
    resident.assert_exact(0)


# What stays cached.


def test_prefixes_kept_in_memory_are_reused_after_resume(resident: Refit) -> None:
    run = resident.run
    run.run(0, some_tokens(PROMPT_LEN))
    before = run.context.snapshot()
    run.engine.suspend()
    assert run.context.snapshot() == before
    run.engine.resume()
    assert run.run(1, some_tokens(PROMPT_LEN)) == PROMPT_LEN - FOUND
    assert run.engine.cached_tokens(1) == FOUND
    resident.assert_exact(0, 1)


def test_prefixes_kept_in_memory_are_reused_for_the_same_weights_version(resident: Refit) -> None:
    run = resident.run
    run.run(0, some_tokens(PROMPT_LEN))
    run.engine.suspend()
    run.engine.resume(run.context.weights_version)
    assert run.run(1, some_tokens(PROMPT_LEN)) == PROMPT_LEN - FOUND
    resident.assert_exact(0, 1)


def test_resumed_requests_reuse_their_prefix_if_the_cache_was_kept(resident: Refit) -> None:
    run = resident.run
    run.add(0, some_tokens(PROMPT_LEN), 40)
    for _ in range(20):
        run.step()
    run.engine.suspend()
    assert run.context.snapshot().state_slots["live"] == run.context.snapshot().kv_blocks["in_use"] == 0
    before = run.counters.prefill_tokens_computed
    run.engine.resume()
    run.finish()
    assert run.counters.prefill_tokens_computed - before <= 2 * BLOCK
    assert len(run.tokens(0)) == 40
    resident.assert_exact(0)


@pytest.mark.parametrize("is_suspended", [True, False])
def test_flush_empties_the_cache_even_for_the_same_weights_version(is_suspended: bool, refit: Refit) -> None:
    run = refit.run
    run.run(0, some_tokens(PROMPT_LEN))
    if is_suspended:
        run.engine.suspend()
    run.engine.flush(run.context.weights_version)
    run.engine.resume()
    assert run.run(1, some_tokens(PROMPT_LEN)) == PROMPT_LEN
    assert run.run(2, some_tokens(PROMPT_LEN)) == PROMPT_LEN - FOUND
    refit.assert_exact(0, 1, 2)


def test_weights_version_loaded_again_reuses_no_earlier_states(resident: Refit) -> None:
    run = resident.run
    for request_id, (version, name) in enumerate([(0, "a"), (1, "b"), (0, "a")]):
        run.engine.suspend()
        resident.load(version)
        run.engine.resume(name)
        assert run.run(request_id, some_tokens(PROMPT_LEN)) == PROMPT_LEN
        resident.assert_exact(request_id)


def test_suspended_engine_reports_only_cache_changes_to_the_coordinator(refit: Refit) -> None:
    run, reported = refit.run, ReportedKeys()
    run.engine._reports = reports = CacheReports(run.context, reported)
    run.run(0, some_tokens(PROMPT_LEN))
    reports.send()
    published, salt = reported.reports[-1]
    assert published.published and salt.weights_version == "0"
    is_resident = run.context.cache_config.resident_pools
    for _ in range(2):
        run.engine.suspend()
        reports.send()
        run.engine.resume()
        reports.send()
    assert len(reported.reports) == (1 if is_resident else 3)
    run.engine.suspend()
    run.engine.flush("1")
    run.engine.resume()
    reports.send()
    changes, salt = reported.reports[-1]
    assert salt.weights_version == "1" and not changes.published
    assert changes.were_flushed or not is_resident


# Mistakes.


def test_new_weights_version_is_refused_while_the_engine_runs(refit: Refit) -> None:
    with pytest.raises(ValueError, match=r"'2' is given to resume\(\), but the engine is not suspended: call flush"):
        refit.run.engine.resume("2")
    assert refit.run.context.weights_version == "0"


def test_invalid_weights_version_leaves_the_engine_suspended(refit: Refit) -> None:
    run = refit.run
    run.engine.suspend()
    for call in (run.engine.resume, run.engine.flush):
        with pytest.raises(ValueError, match="weights_version is 12; it must be a str that can be encoded as UTF-8"):
            call(12)  # type: ignore[arg-type]
    assert run.engine.is_suspended and run.context.weights_version == "0"
    run.engine.resume("12")
    run.run(0, some_tokens(PROMPT_LEN))
    refit.assert_exact(0)
