"""The MTP head of the model that ships loads, changes no token, and drafts tokens that the model accepts."""

import functools
import logging
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache import CacheConfig, build_engine
from megatron_mamba_cache.command_line.built_in_prompts import editing_lines
from megatron_mamba_cache.command_line.commands import EDITING, GREEDY
from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL, ModelDirectory, ModelFormat
from megatron_mamba_cache.command_line.ready_model import ReadyModel, WeightFlags, drafter_maker, ready_model
from megatron_mamba_cache.command_line.request_runner import RequestRunner, SamplingFlags
from megatron_mamba_cache.mcore.mtp_head import MTPHead
from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face

NUM_DRAFTS, REPLY_TOKENS = 3, 32
SAMPLINGS = {"greedy": GREEDY, "sampled": EDITING}
LEAST_ACCEPTED = {"greedy": 0.4, "sampled": 0.3}
"""Of the first drafts; the measured shares are in benchmarks/results/mtp_drafts.md."""


@functools.cache
def shipped() -> ReadyModel:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    directory = ModelDirectory(SHIPPED_MODEL, ModelFormat.HUGGING_FACE)
    return ready_model(directory, "fp32", device, WeightFlags(mtp="required"))


@dataclass(frozen=True, slots=True)
class Served:
    tokens: list[list[int]]
    accepted: float  # share of the first drafts


@functools.cache
def served(sampling: str, num_drafts: int = NUM_DRAFTS, *, shifts: bool = False) -> Served:
    """Serve the first turns of the editing sessions; `shifts` gives the head the hidden state of another token."""
    model = shipped()
    config = CacheConfig(
        block_size_tokens=64,
        cache_gb=0.1,
        max_requests=4,
        num_speculative_tokens=num_drafts,
        adaptive_drafts=False,
    )
    make_drafter = drafter_maker(Namespace(drafter="mtp", draft_hf_model=None), model, lambda *_: {})
    engine = build_engine(model.model, config, drafter=make_drafter(config) if num_drafts else None)
    values = SAMPLINGS[sampling]
    flags = SamplingFlags(REPLY_TOKENS, values["temperature"], int(values["top_k"]), values["top_p"])
    lines = [line for line in editing_lines() if line.request_id % 4 == 0]
    with pytest.MonkeyPatch.context() as patch:
        if shifts:
            patch.setattr(MTPHead, "forward", shifted(MTPHead.forward))
        result = RequestRunner(engine, model.tokenizer, flags, lambda _: None).run(lines)
    counters = result.cache.counters
    assert counters.drafting_failures == 0
    return Served(
        [record.generated_tokens for record in result.records], counters.acceptance_at[0] if num_drafts else 0.0
    )


def shifted(forward: Any) -> Any:
    """Return a forward pass of a head in which each token has the hidden state of the one before it in the batch."""

    def changed(head: MTPHead, embeddings: Tensor, hidden_states: Tensor, *others: Any) -> Tensor:
        found: Tensor = forward(head, embeddings, hidden_states.roll(1, dims=0), *others)
        return found

    return changed


def test_it_is_loaded_only_if_asked_for_and_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert load_hugging_face(SHIPPED_MODEL, torch.float32).mtp is None
    found = load_hugging_face(SHIPPED_MODEL, torch.float32, mtp="auto").mtp
    assert found is not None and found.pattern == "*-"
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING and "megatron_mamba" in one.name]


def test_it_is_a_small_part_of_the_model() -> None:
    model = shipped()
    assert model.mtp is not None
    of_head, of_model = (sum(one.numel() for one in module.parameters()) for module in (model.mtp, model.model))
    assert of_head < 0.1 * of_model


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_its_drafts_change_no_token(sampling: str) -> None:
    assert served(sampling).tokens == served(sampling, 0).tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_its_drafts_are_accepted(sampling: str) -> None:
    assert served(sampling).accepted > LEAST_ACCEPTED[sampling]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_from_wrong_hidden_states_are_accepted_less_and_change_no_token(sampling: str) -> None:
    wrong = served(sampling, shifts=True)
    assert wrong.tokens == served(sampling).tokens
    assert wrong.accepted < 0.7 * served(sampling).accepted
