"""Estimated reads of a model's decode steps, and the policy that plans their drafts."""

from typing import Any

import pytest

from megatron_mamba_cache import CacheConfig, build_engine
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.mcore.step_reads import head_time_of, step_time_of
from megatron_mamba_cache.models.drafting.mtp_drafter import MTPDrafter
from megatron_mamba_cache.ranks.group import OneRank
from megatron_mamba_cache.speculation.all_drafts import AllDrafts
from megatron_mamba_cache.speculation.draft_policy import DraftPolicy
from megatron_mamba_cache.speculation.step_time import CPU, StepReads
from tests.mcore.checked_draft_model import CheckedDraftModel
from tests.mcore.engine_runs import Hybrid, cache_config, tiny_hybrid
from tests.mcore.mtp_drafters import random_head
from tests.mcore.noisy_drafter import NoisyDrafter
from tests.mcore.random_workloads import MODEL_FORMS


def reads_of(subject: Hybrid, **settings: Any) -> StepReads:
    shape = model_shape_of(subject.model)
    return step_time_of(subject.model, shape, CacheConfig(**settings), OneRank()).reads


def matrices_of(model: Any) -> int:
    """Return the weights that every token is multiplied with, counted by hand."""
    named = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
    return sum(weight.numel() for name, weight in named.items() if name.startswith("decoder."))


def test_estimated_reads_of_a_dense_model_include_all_weights() -> None:
    subject = tiny_hybrid()
    reads, sizes = reads_of(subject), subject.sizes
    output = subject.model.vocab_size * sizes.hidden_size
    assert reads.weights == 4 * (matrices_of(subject.model) + output) and reads.macs == reads.weights // 4
    assert (reads.expert, reads.num_experts, reads.experts_hit(100)) == (0, 0, 0)
    assert reads.num_layers == len(subject.model.decoder.layer_type_list)


def test_estimated_reads_of_an_moe_model_include_only_chosen_experts() -> None:
    subject = tiny_hybrid(**next(iter(MODEL_FORMS["experts"])))
    reads, config = reads_of(subject), subject.model.config
    stacked = [weight for name, weight in subject.model.named_parameters() if ".experts.linear_fc" in name]
    assert stacked and reads.expert == 4 * sum(weight[0].numel() for weight in stacked)
    assert reads.num_experts == config.num_moe_experts
    assert reads.experts_hit(1) == pytest.approx(config.moe_router_topk)
    assert config.moe_router_topk < reads.experts_hit(3) < config.num_moe_experts
    output = subject.model.vocab_size * config.hidden_size
    dense = matrices_of(subject.model) + output
    assert reads.weights == 4 * dense and reads.macs == dense + config.moe_router_topk * reads.expert // 4


@pytest.mark.parametrize("form", ["dense", "experts"])
def test_estimated_reads_of_a_draft_are_those_of_the_head_and_the_output_layer(form: str) -> None:
    subject = tiny_hybrid(**next(iter(MODEL_FORMS[form])))
    head, config = random_head(subject.sizes), subject.model.config
    reads = head_time_of(subject.model, head, subject.model.vocab_size).reads
    dense = [weight for name, weight in head.named_parameters() if weight.dim() == 2 and ".experts." not in name]
    output = subject.model.vocab_size * config.hidden_size
    assert reads.weights == 4 * (sum(weight.numel() for weight in dense) + output)
    assert reads.experts_hit(1) == pytest.approx(config.moe_router_topk if form == "experts" else 0)
    seconds = MTPDrafter(subject.model, head).draft_seconds
    assert 0 < 3 * seconds(1, 1) == pytest.approx(seconds(1, 3))


def test_draft_verification_writes_one_state_per_draft_token() -> None:
    subject = tiny_hybrid()
    window, auto, replay = (
        reads_of(subject, draft_states=form, num_speculative_tokens=3) for form in ("window", "auto", "replay")
    )
    assert window.state == 2 * window.draft == 2 * replay.state > 0 == replay.draft
    assert auto == window  # on a CPU


@pytest.mark.parametrize(("settings", "width"), [({}, 0), ({"num_cuda_graphs": 2}, 4), ({"run_ahead": False}, 0)])
def test_estimated_width_of_captured_steps_includes_the_maximum_number_of_drafts(
    settings: dict[str, Any], width: int
) -> None:
    subject = tiny_hybrid()
    config = CacheConfig(num_speculative_tokens=3, **settings)
    time = step_time_of(subject.model, model_shape_of(subject.model), config, OneRank())
    assert (time.width, time.device) == (width, CPU)


class SaysHowLong(NoisyDrafter):
    """Take a while."""

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        return 0.001 * num_drafts


def test_draft_policy_is_patient_only_with_drafters_that_report_their_time() -> None:
    subject = tiny_hybrid()
    vocab = subject.sizes.vocab_size
    drafters = {
        "prompt lookup": (None, (True, False)),
        "says how long": (SaysHowLong({}, accuracy=1.0, vocab_size=vocab), (False, True)),
        "does not say": (NoisyDrafter({}, accuracy=1.0, vocab_size=vocab), (False, False)),
        "a draft model": (CheckedDraftModel.start(subject), (False, True)),
    }
    for name, (drafter, expected) in drafters.items():
        config = cache_config(subject.sizes, num_speculative_tokens=3)
        policy = build_engine(subject.model, config, drafter=drafter).context.planner._policy
        assert isinstance(policy, DraftPolicy) and (policy._shadows, policy._is_patient) == expected, name
    config = cache_config(subject.sizes, num_speculative_tokens=3, adaptive_drafts=False)
    assert isinstance(build_engine(subject.model, config).context.planner._policy, AllDrafts)
