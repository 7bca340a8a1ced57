"""Short lists, and choosing between a head and prompt lookup, change no token of an engine."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.models.drafting.mtp_drafter import MTPDrafter
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from megatron_mamba_cache.speculation.prompt_lookup import AutoDrafter, PromptLookupDrafter
from megatron_mamba_cache.speculation.short_list import ShortList
from tests.mcore.engine_runs import EngineRun
from tests.mcore.graph_stand_ins import capture_without_cuda, with_graphs
from tests.models.checkpoint_edits import tensors_of, write_tensors
from tests.models.mostly_right import MostlyRight
from tests.models.mtp_heads import head_tensors
from tests.models.served_run import served_config, some_prompt
from tests.models.tiny_checkpoints import TinyCheckpoint, tiny_checkpoint

NUM_TOKENS = 64
CASES = ["nemotron_h_moe-1", "qwen3_5-1"]
SAMPLING = [{"top_k": 1}, {"temperature": 0.8, "top_k": 5}]
with_sampling = pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])

Loaded = tuple[TinyCheckpoint, LoadedModel]


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Write and load a checkpoint with a head."""
    case, directory = tiny_checkpoint(request.param), tmp_path_factory.mktemp(request.param)
    case.write(case.model(), directory)
    write_tensors(directory, tensors_of(directory) | head_tensors(case.config))
    return case, load_hugging_face(directory, torch.float32, mtp="required")


def run_of(
    loaded: Loaded, drafter: Any = None, sampling: dict[str, Any] | None = None, *, num_graphs: int = 0, **settings: Any
) -> EngineRun:
    """Return a finished run of three requests."""
    case, model = loaded
    config = served_config(case, num_speculative_tokens=0 if drafter is None else 3, **settings)
    if num_graphs:
        config = with_graphs(config, num_graphs)
    run = EngineRun(model, build_engine(model.model, config, drafter=drafter))  # type: ignore[arg-type]
    params = SamplingParams(num_tokens_to_generate=NUM_TOKENS, termination_id=-1, **sampling or {"top_k": 1})
    for request_id in range(3):
        run.add(request_id, some_prompt(case, 20 + 7 * request_id, seed=request_id), params)
    run.finish()
    assert run.counters.drafting_failures == 0
    return run


def replies_of(run: EngineRun) -> dict[int, list[int]]:
    return {request_id: run.tokens(request_id) for request_id in run.prompts}


class Recording(MTPDrafter):
    """Records all draft tokens."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.drafted: set[int] = set()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found = super().propose(requests)
        self.drafted = self.drafted.union(*(draft.tokens for draft in found))
        return found


@with_sampling
def test_drafts_of_a_short_list_change_no_token(loaded: Loaded, sampling: dict[str, Any]) -> None:
    model = loaded[1]
    short_list = ShortList(model.model, 24)
    drafter = Recording(model.model, model.mtp, short_list)  # type: ignore[arg-type]
    run = run_of(loaded, drafter, sampling, adaptive_drafts=False)
    assert replies_of(run) == replies_of(run_of(loaded, None, sampling))
    assert (
        drafter.drafted
        and short_list.tokens.num_unlisted([*drafter.drafted]) == drafter.num_unlisted([*drafter.drafted]) == 0
    )
    assert 0 < run.counters.unlisted_tokens <= run.counters.draft_tokens - run.counters.accepted_tokens
    assert any(short_list.tokens.num_unlisted(reply) for reply in replies_of(run).values())


@with_sampling
def test_auto_uses_both_drafters_and_changes_no_token(
    loaded: Loaded, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, replies = loaded[1], replies_of(run_of(loaded, None, sampling))
    looked_up: list[Draft] = []
    propose = PromptLookupDrafter.propose

    def recorded(self: PromptLookupDrafter, requests: Sequence[DraftRequest]) -> list[Draft]:
        found = propose(self, requests)
        looked_up.extend(found)
        return found

    monkeypatch.setattr(PromptLookupDrafter, "propose", recorded)
    run = run_of(loaded, AutoDrafter(MostlyRight(model.model, model.mtp, replies=replies)), sampling)
    assert replies_of(run) == replies
    counters = run.counters
    print(f"{counters.accepted_tokens} of {counters.draft_tokens} drafts, {len(looked_up)} looked up")
    assert counters.accepted_tokens > 20 and looked_up


@pytest.mark.parametrize("is_right", [False, True], ids=["useless", "useful"])
def test_most_steps_overlap_with_auto(loaded: Loaded, is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With useless drafts, drafting pauses; with useful ones, most steps follow on the device."""
    model, sampling = loaded[1], {"temperature": 1.0}
    replies = replies_of(run_of(loaded, None, sampling))
    capture_without_cuda(monkeypatch)
    known: dict[int, list[int]] = replies if is_right else {request_id: [] for request_id in replies}
    drafter = MostlyRight(model.model, model.mtp, replies=known)
    overlapped = []
    launched = "megatron_mamba_cache.step.overlap.OverlappedSteps.take"

    def take(steps: Any) -> Any:
        step, steps.launched = steps.launched, None
        overlapped.append(step is not None)
        return step

    monkeypatch.setattr(launched, take)
    run = run_of(loaded, AutoDrafter(drafter), sampling, num_graphs=3)
    assert replies_of(run) == replies
    counters = run.counters
    print(f"{sum(overlapped)} of {len(overlapped)} steps overlap; {counters.acceptance_rate:.0%} accepted")
    assert sum(overlapped) > 0.5 * len(overlapped) and (counters.acceptance_rate > 0.4) == is_right
