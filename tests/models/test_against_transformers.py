"""Loaded checkpoints match transformers, with the cache on and prompts prefilled in chunks.

Evaluated in float64, both are the same model to many digits. In float32 each rounds on its own (most of it in linear
layers, and in rotary angles, which both round alike), and with large SSM chunks transformers' rounding is near the
tolerance at times: see `assert_agree`.
"""

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
from tests.models.float64 import ours_in_float64, transformers_in_float64
from tests.models.reference_run import NUM_GENERATED, ReferenceRun, reference_run
from tests.models.served_run import BRANCH, FIRST, PROMPT_OF, REPEAT, ServedRun, full_sequence_logits, served_run
from tests.models.tiny_checkpoints import CASE_NAMES, LARGE_CHUNK_NAMES, TinyCheckpoint, tiny_checkpoint

TOLERANCE = 1e-4
EXACT_TOLERANCE = 2e-5
"""Relative tolerance to the float64 model's largest logit where transformers has a larger error; CPUs differ."""

AMBIGUOUS_MARGIN = 1e-4
FLOAT64_TOLERANCE = 1e-10
# A third of the cases by default. A large chunk of each family in CI, each chunk of some family.
LARGE = {
    "nemotron_h-7-chunk128",
    "nemotron_h_moe-6-chunk256",
    "bamba-4-chunk64",
    "granite-6-chunk256",
    "granite_moe-3-chunk128",
}
CASES = [
    *(pytest.param(name, marks=pytest.mark.long) if index % 3 else name for index, name in enumerate(CASE_NAMES)),
    *(pytest.param(name, marks=pytest.mark.long if name in LARGE else pytest.mark.slow) for name in LARGE_CHUNK_NAMES),
]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Logits and tokens of one checkpoint in transformers and in this package."""

    case: TinyCheckpoint
    reference: ReferenceRun
    served: ServedRun
    full_sequence_logits: Tensor
    exact: Tensor  # [2, prompt + generated, vocab], transformers' model in float64
    our_exact: Tensor  # alike, ours

    @property
    def exact_prompt(self) -> Tensor:
        """Return the reference of `full_sequence_logits`."""
        return self.exact[:, : self.reference.prompts.shape[1]]

    @property
    def exact_steps(self) -> Tensor:
        """Return the reference logits [2, generated, vocab] for the sampled tokens."""
        return self.exact[:, self.reference.prompts.shape[1] - 1 : -1]

    def num_comparable(self, request: int) -> int:
        """Return the number of generated tokens before the first one that transformers itself is unsure of."""
        unsure = (self.reference.margins(PROMPT_OF[request]) < AMBIGUOUS_MARGIN).nonzero()
        return int(unsure[0]) if len(unsure) else NUM_GENERATED


@pytest.fixture(scope="module", params=CASES)
def comparison(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Write, load and run each checkpoint once."""
    case, directory = tiny_checkpoint(request.param), tmp_path_factory.mktemp(request.param)
    reference = reference_run(case)
    case.write(reference.model, directory)
    loaded = load_hugging_face(directory, torch.float32)
    served = served_run(case, loaded, reference)
    in_float32 = full_sequence_logits(loaded, reference.prompts)
    whole = torch.cat([reference.prompts, reference.tokens], dim=1)
    exact, our_exact = transformers_in_float64(reference.model, whole), ours_in_float64(loaded, whole)
    return Comparison(case, reference, served, in_float32, exact, our_exact)


def assert_agree(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """Assert that logits match transformers within the tolerance.

    Where the difference is larger, both must have rounding errors: ours are within `EXACT_TOLERANCE` of transformers'
    model in float64, and no further from it than its own logits are at most.
    """
    apart = (ours - theirs).abs() > TOLERANCE
    our_errors, their_errors = ((logits[apart] - exact[apart]).abs() for logits in (ours, theirs))
    assert (our_errors <= EXACT_TOLERANCE * exact.abs().max()).all()
    assert (our_errors <= (theirs - exact).abs().max()).all()
    if apart.any():
        warnings.warn(
            f"{int(apart.sum())} of {apart.numel()} logits of transformers are up to {their_errors.max():.1e} from its "
            f"own model in float64, ours up to {our_errors.max():.1e}",
            stacklevel=2,
        )


def test_float64_logits_match_transformers(comparison: Comparison) -> None:
    assert comparison.exact.dtype is torch.float64
    assert (comparison.our_exact - comparison.exact).abs().max() <= FLOAT64_TOLERANCE


def test_full_sequence_logits_match_transformers(comparison: Comparison) -> None:
    assert_agree(comparison.full_sequence_logits, comparison.reference.prompt_logits, comparison.exact_prompt)


def test_engine_samples_from_the_logits_of_transformers(comparison: Comparison) -> None:
    for request, row in PROMPT_OF.items():
        known = slice(comparison.num_comparable(request) + 1)  # the logits of an unsure choice still agree
        assert_agree(
            comparison.served.logits[request][known],
            comparison.reference.step_logits[row][known],
            comparison.exact_steps[row][known],
        )


def test_greedy_tokens_match_transformers(comparison: Comparison) -> None:
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


def test_prefill_skips_shared_prefixes(comparison: Comparison) -> None:
    block, reference = comparison.case.block_size, comparison.reference
    assert comparison.served.num_cached == {
        FIRST: 0,
        REPEAT: (reference.prompts.shape[1] - 1) // block * block,
        BRANCH: reference.num_shared // block * block,
    }
    assert comparison.served.num_cached[BRANCH] > 0
