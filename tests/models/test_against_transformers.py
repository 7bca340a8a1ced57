"""Loaded checkpoints compute what transformers computes, with the cache on and prompts prefilled in pieces."""

import warnings
from dataclasses import dataclass

import pytest
import torch

from megatron_mamba_cache.models.hugging_face import load_hugging_face
from tests.models.reference_run import NUM_GENERATED, ReferenceRun, reference_run
from tests.models.served_run import BRANCH, FIRST, PROMPT_OF, REPEAT, ServedRun, full_sequence_logits, served_run
from tests.models.tiny_checkpoints import CASE_NAMES, TinyCheckpoint, tiny_checkpoint

TOLERANCE = 1e-4
AMBIGUOUS_MARGIN = 1e-4


@dataclass(frozen=True, slots=True)
class Comparison:
    """One checkpoint through both implementations."""

    case: TinyCheckpoint
    reference: ReferenceRun
    served: ServedRun
    full_sequence_logits: torch.Tensor

    def num_comparable(self, request: int) -> int:
        """Return how many generated tokens come before one that transformers itself is unsure of."""
        unsure = (self.reference.margins(PROMPT_OF[request]) < AMBIGUOUS_MARGIN).nonzero()
        return int(unsure[0]) if len(unsure) else NUM_GENERATED


@pytest.fixture(scope="module", params=CASE_NAMES)
def comparison(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Write, load and run each checkpoint once."""
    case, directory = tiny_checkpoint(request.param), tmp_path_factory.mktemp(request.param)
    reference = reference_run(case)
    case.write(reference.model, directory)
    loaded = load_hugging_face(directory, torch.float32)
    served = served_run(case, loaded, reference)
    return Comparison(case, reference, served, full_sequence_logits(loaded, reference.prompts))


def test_full_sequence_logits_are_those_of_transformers(comparison: Comparison) -> None:
    difference = comparison.full_sequence_logits - comparison.reference.prompt_logits
    assert difference.abs().max() <= TOLERANCE


def test_engine_chooses_tokens_by_the_logits_of_transformers(comparison: Comparison) -> None:
    for request, row in PROMPT_OF.items():
        known = slice(comparison.num_comparable(request) + 1)  # the logits of an unsure choice still agree
        difference = comparison.served.logits[request][known] - comparison.reference.step_logits[row][known]
        assert difference.abs().max() <= TOLERANCE


def test_greedy_tokens_are_those_of_transformers(comparison: Comparison) -> None:
    for request, row in PROMPT_OF.items():
        count = comparison.num_comparable(request)
        if count < NUM_GENERATED:
            warnings.warn(
                f"{comparison.case.name}: request {request} is compared for {count} tokens only; transformers' margin "
                f"at the next is {comparison.reference.margins(row)[count]:.1e}",
                stacklevel=1,
            )
        assert comparison.served.tokens[request][:count] == comparison.reference.tokens[row].tolist()[:count]
    assert max(map(comparison.num_comparable, PROMPT_OF)) == NUM_GENERATED


def test_shared_prefixes_are_skipped(comparison: Comparison) -> None:
    block, reference = comparison.case.block_size, comparison.reference
    assert comparison.served.num_cached == {
        FIRST: 0,
        REPEAT: (reference.prompts.shape[1] - 1) // block * block,
        BRANCH: reference.num_shared // block * block,
    }
    assert comparison.served.num_cached[BRANCH] > 0
