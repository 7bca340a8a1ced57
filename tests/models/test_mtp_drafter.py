"""Drafts of a multi-token prediction head change no token, and follow from verified tokens only."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams
from torch import Tensor

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.models.drafting import mtp_drafter
from megatron_mamba_cache.models.drafting.mtp_drafter import MTPDrafter
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from tests.mcore.engine_runs import EngineRun
from tests.models.checkpoint_edits import tensors_of, write_tensors
from tests.models.mtp_heads import HeadOracle, head_tensors
from tests.models.served_run import served_config, some_prompt
from tests.models.tiny_checkpoints import TinyCheckpoint, tiny_checkpoint

NUM_REQUESTS, NUM_TOKENS = 3, 24
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
    """Records each draft with the text and the verified hidden states before it."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.states: dict[int, list[Tensor]] = {}
        self.drafts: list[tuple[list[int], Tensor, Draft]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found = super().propose(requests)
        for request, draft in zip(requests, found, strict=True):
            assert request.hidden_states is not None
            states = self.states.setdefault(request.running.request_id, [])
            states.append(request.hidden_states.clone())
            text = list(request.running.tokens(0, request.running.length))
            self.drafts.append((text, torch.cat(states), draft))
        return found


def served(loaded: Loaded, num_drafts: int, drafter_settings: dict[str, Any] | None = None, **sampling: Any) -> Any:
    """Return the tokens of requests by id, and the drafter."""
    case, model = loaded
    config = served_config(case, num_speculative_tokens=num_drafts, adaptive_drafts=False)
    assert model.mtp is not None
    drafter = RecordingDrafter(model.model, model.mtp, config, **drafter_settings or {}) if num_drafts else None
    run = EngineRun(model, build_engine(model.model, config, drafter=drafter))  # type: ignore[arg-type]
    for request_id in range(NUM_REQUESTS):
        params = SamplingParams(num_tokens_to_generate=NUM_TOKENS, termination_id=-1, **sampling)
        run.engine.add_request(request_id, some_prompt(case, 20 + 7 * request_id, seed=request_id), params)
    texts = {}
    while run.engine.requests:
        for record in run.engine.step_modern()["finished_request_records"]:
            request = record.merge()
            texts[request.request_id] = list(request.generated_tokens)
    if num_drafts:
        assert run.engine.context.counters.drafting_failures == 0
        assert run.engine.context.counters.draft_tokens > NUM_TOKENS
    return texts, drafter


SAMPLING = [{"top_k": 1}, {"temperature": 0.8, "top_k": 5}]


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])
def test_tokens_equal_those_without_drafts(loaded: Loaded, num_drafts: int, sampling: dict[str, Any]) -> None:
    assert served(loaded, num_drafts, **sampling)[0] == served(loaded, 0, **sampling)[0]


def test_drafts_equal_those_of_the_oracle_over_the_reply(loaded: Loaded) -> None:
    case, model = loaded
    embeddings = model.model.embedding.word_embeddings.weight.detach()
    tensors = {name: tensor.to(embeddings.device) for name, tensor in head_tensors(case.config).items()}
    oracle = HeadOracle(case.config.get_text_config(), tensors)
    output = embeddings if model.model.share_embeddings_and_output_weights else model.model.output_layer.weight.detach()
    _, drafter = served(loaded, 3, top_k=1)
    num_checked = 0
    for text, states, draft in drafter.drafts:
        tokens, hidden = torch.tensor(text[-len(states) :], device=states.device), states
        for token in draft.tokens:
            last = oracle.outputs(embeddings[tokens], hidden)[-1:]
            logits = (last @ output.T)[0]
            assert logits[token] > logits.max() - 1e-3
            tokens, hidden = torch.cat((tokens, tokens.new_tensor([token]))), torch.cat((hidden, last))
            num_checked += 1
    assert num_checked > NUM_TOKENS


def test_full_window_begins_again(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp_drafter, "_BLOCK_SIZE", 4)
    assert served(loaded, 3, {"window": 12}, top_k=1)[0] == served(loaded, 0, top_k=1)[0]


def test_forgotten_requests_free_their_rows(loaded: Loaded) -> None:
    _, drafter = served(loaded, 1, top_k=1)
    assert not drafter._windows
    assert sorted(drafter._free_rows) == list(range(4))
