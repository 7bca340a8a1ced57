"""Drafts of a multi-token prediction head change no token, and are those of an uncached text at any cached depth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.mcore.mtp_head import MTPHead
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face, read_head_pattern
from megatron_mamba_cache.models.drafting.mtp_drafter import MTPDrafter
from megatron_mamba_cache.models.shard_shape import shard_shape
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from megatron_mamba_cache.speculation.short_list import ShortList
from megatron_mamba_cache.step.overlapped_step import CapturedStep
from megatron_mamba_cache.step.runner import StepRunner
from tests.mcore.engine_runs import EngineRun
from tests.mcore.graph_stand_ins import capture_without_cuda, with_graphs
from tests.mcore.mtp_drafters import hidden_states_of
from tests.models.checkpoint_edits import tensors_of, write_tensors
from tests.models.mtp_heads import HeadOracle, head_tensors
from tests.models.served_run import served_config, some_prompt
from tests.models.tiny_checkpoints import TinyCheckpoint, tiny_checkpoint

NUM_TOKENS = 24
NUM_REQUESTS = 3
CASES = ["nemotron_h_moe-1", "qwen3_5-1", "qwen3_5_moe-0"]

Loaded = tuple[TinyCheckpoint, LoadedModel]


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Write and load a checkpoint with a head."""
    case, directory = tiny_checkpoint(request.param), tmp_path_factory.mktemp(request.param)
    case.write(case.model(), directory)
    write_tensors(directory, tensors_of(directory) | head_tensors(case.config))
    return case, load_hugging_face(directory, torch.float32, mtp="required")


class RecordingDrafter(MTPDrafter):
    """Records each draft with the request and the text before it."""

    def __init__(self, model: Any, head: MTPHead, short_list: ShortList | None = None) -> None:
        super().__init__(model, head, short_list)
        self.drafts: list[tuple[int, list[int], Draft]] = []
        self.num_followed = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found = super().propose(requests)
        for request, draft in zip(requests, found, strict=True):
            running = request.running
            self.drafts.append((running.request_id, list(map(int, running.tokens(0, running.length))), draft))
        return found

    def follow(self, graph: CapturedStep, requests: Sequence[RunningRequest]) -> None:
        super().follow(graph, requests)
        self.num_followed += 1
        assert self._passes is not None
        drafts, outcome = self._passes._drafts.tolist(), graph.outcome.tolist()
        for row, running in enumerate(requests):
            accepted, *new = outcome[row]
            text = [*map(int, running.tokens(0, running.length)), *new[:accepted]]
            self.drafts.append((running.request_id, text, Draft(tuple(drafts[row][: len(running.drafts)]))))


class Conversation:
    """Requests to one engine: three prompts at once, then a repeat, a branch and next turns, one after another."""

    def __init__(
        self,
        loaded: Loaded,
        num_drafts: int,
        *,
        num_graphs: int = 0,
        run_ahead: bool = True,
        short_list: ShortList | None = None,
        settings: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> None:
        self._case, model = loaded
        drafts = {"num_speculative_tokens": num_drafts, "adaptive_drafts": False}
        config = served_config(self._case, **drafts, run_ahead=run_ahead, **settings or {})
        if num_graphs:
            config = with_graphs(config, num_graphs)
        assert model.mtp is not None
        self.drafter = RecordingDrafter(model.model, model.mtp, short_list)
        engine = build_engine(model.model, config, drafter=self.drafter if num_drafts else None)
        self.run = EngineRun(model, engine)  # type: ignore[arg-type]
        self.params = SamplingParams(num_tokens_to_generate=NUM_TOKENS, termination_id=-1, **sampling)
        block = config.block_size_tokens
        prompts = [some_prompt(self._case, length, seed=length) for length in (block + 5, block, 2 * block + 7)]
        for request_id, prompt in enumerate(prompts):
            self.run.add(request_id, prompt, self.params)
        self.run.finish()
        self.resumed: list[int] = []  # requests whose prompts begin with cached text
        more = some_prompt(self._case, 9, seed=1)
        self._ask(prompts[2])
        self._ask(prompts[2][: block + 3] + more)
        for earlier in (0, 1, 5):
            self._ask(self.run.prompts[earlier] + self.run.tokens(earlier) + more)

    def _ask(self, prompt: list[int]) -> None:
        request_id = len(self.run.prompts)
        self.run.run(request_id, prompt, self.params)
        self.resumed.append(request_id)
        assert self.run.engine.cached_tokens(request_id) > 0

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Return the reply of each request."""
        return {request_id: self.run.tokens(request_id) for request_id in self.run.prompts}


SAMPLING = [{"top_k": 1}, {"temperature": 0.8, "top_k": 5}]


@pytest.mark.parametrize(
    ("num_graphs", "num_drafts", "kv_cache_dtype"),
    [
        (0, 1, "auto"),
        (2, 3, "auto"),
        (2, 3, "fp8"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 3, "auto"), (2, 1, "auto"), (0, 3, "fp8"))),
    ],
)
@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])
def test_tokens_equal_those_without_drafts(
    loaded: Loaded,
    num_graphs: int,
    num_drafts: int,
    kv_cache_dtype: str,
    sampling: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With graphs, most steps are launched with drafts before the host has read the tokens of the last step."""
    capture_without_cuda(monkeypatch)
    settings = {"kv_cache_dtype": kv_cache_dtype}
    found = Conversation(loaded, num_drafts, num_graphs=num_graphs, settings=settings, **sampling)
    assert (found.drafter.num_followed > 0) == (num_graphs > 0)
    assert (found.drafter.mtp_chain.kv_cache.dtype == torch.float32) == (kv_cache_dtype == "auto")
    assert found.run.counters.drafting_failures == 0
    assert found.run.counters.draft_tokens > NUM_TOKENS
    assert found.tokens == Conversation(loaded, 0, settings=settings, **sampling).tokens


@torch.inference_mode()
def test_drafts_are_those_of_an_uncached_text_from_the_first_step(loaded: Loaded) -> None:
    case, model = loaded
    embeddings = model.model.embedding.word_embeddings.weight.detach()
    tensors = {name: tensor.to(embeddings.device) for name, tensor in head_tensors(case.config).items()}
    oracle = HeadOracle(case.config.get_text_config(), tensors)
    output = embeddings if model.model.share_embeddings_and_output_weights else model.model.output_layer.weight.detach()
    found = Conversation(loaded, 3, top_k=1)
    first_drafted: dict[int, int] = {}
    for request_id, text, draft in found.drafter.drafts:
        first_drafted.setdefault(request_id, len(text))
        tokens = torch.tensor(text, device=embeddings.device)
        hidden = hidden_states_of(model.model, tokens[:-1])
        hidden = torch.cat((torch.zeros_like(hidden[:1]), hidden))
        assert 0 < len(draft.tokens) <= 3
        for token in draft.tokens:
            last = oracle.outputs(embeddings[tokens], hidden)[-1:]
            logits = (last @ output.T)[0]
            assert logits[token] > logits.max() - 1e-3
            tokens, hidden = torch.cat((tokens, tokens.new_tensor([token]))), torch.cat((hidden, last))
    for request_id in found.resumed:
        assert first_drafted[request_id] == len(found.run.prompts[request_id]) + 1


def test_expected_memory_is_that_of_the_loaded_model(loaded: Loaded) -> None:
    case, model = loaded
    found = model_shape_of(model.model, head=model.mtp)
    config = found.with_forms(served_config(case, num_speculative_tokens=3))
    expected = shard_shape(model.architecture, torch.float32, head_pattern=read_head_pattern(Path(model.directory)))
    assert expected.unit_bytes(config) == found.unit_bytes(config)
    assert expected.head_types == found.head_types


def test_drafter_without_an_engine_says_what_it_needs(loaded: Loaded) -> None:
    _, model = loaded
    assert model.mtp is not None
    with pytest.raises(Exception, match="give its drafter to build_engine"):
        _ = MTPDrafter(model.model, model.mtp).mtp_chain.context


def test_second_engine_with_the_same_drafter_is_refused(loaded: Loaded) -> None:
    case, model = loaded
    assert model.mtp is not None
    drafter, config = MTPDrafter(model.model, model.mtp), served_config(case, num_speculative_tokens=2)
    engine = build_engine(model.model, config, drafter=drafter)
    with pytest.raises(ValueError, match="one drafter for each engine"):
        build_engine(model.model, config, drafter=drafter)
    engine.close()
    build_engine(model.model, config, drafter=drafter).close()


def test_suspended_engine_resumes_only_when_no_other_uses_its_drafter(loaded: Loaded) -> None:
    case, model = loaded
    assert model.mtp is not None
    drafter, config = MTPDrafter(model.model, model.mtp), served_config(case, num_speculative_tokens=2)
    params, prompt = SamplingParams(num_tokens_to_generate=8, top_k=1, termination_id=-1), some_prompt(case, 21, seed=0)
    runs = []
    for _ in range(2):
        runs.append(EngineRun(model, build_engine(model.model, config, drafter=drafter)))  # type: ignore[arg-type]
        runs[-1].run(0, prompt, params)
        runs[-1].engine.suspend()
    first, second = runs
    second.engine.resume()
    with pytest.raises(ValueError, match="one drafter for each engine"):
        first.engine.resume()
    second.run(1, prompt, params)
    second.engine.close()
    first.engine.resume()
    first.run(1, prompt, params)
    assert first.tokens(0) == first.tokens(1) == second.tokens(0) == second.tokens(1)
    assert not any(run.counters.drafting_failures for run in runs)


def test_hidden_states_of_all_tokens_end_with_the_forward_pass(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    case, model = loaded
    assert model.mtp is not None
    drafter, config = MTPDrafter(model.model, model.mtp), served_config(case, num_speculative_tokens=2)
    engine = build_engine(model.model, config, drafter=drafter, scores_prompts=True)
    found: list[tuple[int, int]] = []
    publish = StepRunner.publish_prompts

    def published(runner: StepRunner) -> None:
        found.append((runner.step.num_prefill_requests, len(runner.step.hidden_states)))
        publish(runner)

    monkeypatch.setattr(StepRunner, "publish_prompts", published)
    run, prompt = EngineRun(model, engine), some_prompt(case, 21, seed=0)  # type: ignore[arg-type]
    scored = {"return_log_probs": True, "skip_prompt_log_probs": False}
    for request_id, settings in enumerate(({}, scored)):
        run.run(request_id, prompt, SamplingParams(num_tokens_to_generate=4, top_k=1, **settings))
    assert [tokens for num_prompts, tokens in found if num_prompts] == [0, len(prompt)]
    assert not any(tokens for num_prompts, tokens in found if not num_prompts)


def test_warmup_changes_no_state_and_no_real_block(loaded: Loaded) -> None:
    drafter = Conversation(loaded, 2, top_k=1).drafter
    memory = drafter.mtp_chain.context.memory
    states, entries = [tensor.clone() for tensor in memory.state_pool.tensors], drafter.mtp_chain.kv_cache.clone()
    drafter.warmup()
    assert all(map(torch.equal, states, memory.state_pool.tensors))
    is_real = torch.arange(entries.shape[2]) != memory.geometry.dummy_block
    assert torch.equal(entries[:, :, is_real], drafter.mtp_chain.kv_cache[:, :, is_real])
    assert not torch.equal(entries, drafter.mtp_chain.kv_cache)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_passes_in_graphs_draft_the_same(loaded: Loaded, run_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded passes of captured batch sizes draft what passes of the exact batch size do.

    With `run_ahead`, passes start from the outcome on the device, also after the end of a request, which is discarded.
    """

    def drafts_by_text(drafter: RecordingDrafter) -> dict[tuple[int, ...], tuple[int, ...]]:
        return {tuple(text): draft.tokens for _, text, draft in drafter.drafts}

    expected = drafts_by_text(Conversation(loaded, 3).drafter)
    capture_without_cuda(monkeypatch)
    conversation = Conversation(loaded, 3, num_graphs=2, run_ahead=run_ahead)
    drafter = conversation.drafter
    assert drafter._passes is not None and drafter._passes._captured
    assert (drafter.num_followed > 0.6 * conversation.run.counters.steps) is run_ahead
    found = drafts_by_text(drafter)
    common = found.keys() & expected.keys()  # the last draft of a request depends on when its end is noticed
    assert len(common) > 0.9 * len(expected)
    for text in common:  # drafts of the last tokens are shorter if the host knows the length
        assert expected[text] == found[text][: len(expected[text])]
        assert run_ahead or len(found[text]) == len(expected[text])
