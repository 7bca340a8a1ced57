"""With any drafts, generated text has the model's distribution; sample counts are tested against probabilities."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.sampling.row_tiles import SamplingRows
from megatron_mamba_cache.kernels.sampling.sampling import sample_tokens, token_probabilities
from megatron_mamba_cache.kernels.sampling.verification import (
    DraftDistributions,
    RatioUniforms,
    VerifyLogits,
    accept_by_ratio,
    accept_matching,
)
from tests.kernels.sampling_oracle import kept_probabilities

VOCAB, NUM_TOKENS, NUM_ROWS, MAX_DRAFTS = 8, 4, 20_000, 3
FIRST_TOKEN = 2
NUM_POSITIONS = NUM_TOKENS + MAX_DRAFTS + 1

SETTINGS = [(1.0, 0, 0.0), (0.6, 3, 0.0), (1.7, 0, 0.8), (0.9, 5, 0.9), (0.0, 0, 0.0)]
"""Temperature, top-k and top-p."""

Proposal = Callable[[Tensor], Tensor]
"""Function from a model's logits [rows, vocab] to the distribution [rows, vocab] of drafts."""


def model_logits() -> Tensor:
    """Return the logits [vocab, vocab] of a Markov chain: row t follows token t."""
    return 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Drafting:
    """A way to draft: the distribution of drafts, and the rows for which the verifier gets this distribution.

    Drafts in other rows are verified by matching.
    """

    proposal: Proposal
    samples: Callable[[Tensor], Tensor]  # row numbers [rows] -> [rows] bool


def all_rows(rows: Tensor) -> Tensor:
    return torch.ones_like(rows, dtype=torch.bool)


def no_rows(rows: Tensor) -> Tensor:
    return torch.zeros_like(rows, dtype=torch.bool)


def least_likely(logits: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(logits.argmin(dim=-1), VOCAB).double()


def most_likely(logits: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(logits.argmax(dim=-1), VOCAB).double()


def uniform(logits: Tensor) -> Tensor:
    return torch.full(logits.shape, 1 / VOCAB, dtype=torch.float64)


def model_like(logits: Tensor) -> Tensor:
    return torch.softmax(0.8 * logits.double() + 0.3 * torch.cos(torch.arange(VOCAB)), dim=-1)


def opposite(logits: Tensor) -> Tensor:
    return torch.softmax(-4 * logits.double(), dim=-1)


DRAFTINGS = {
    "always_wrong": Drafting(least_likely, no_rows),
    "most_likely": Drafting(most_likely, no_rows),
    "random": Drafting(uniform, no_rows),
    "drawn_model_like": Drafting(model_like, all_rows),
    "drawn_uniform": Drafting(uniform, all_rows),
    "drawn_opposite": Drafting(opposite, all_rows),
    "drawn_single": Drafting(most_likely, all_rows),
    "mixed_rows": Drafting(model_like, lambda rows: rows % 3 == 0),
}


class Continuations:
    """Texts that are continued in verify steps with 0 to `MAX_DRAFTS` drafts each."""

    def __init__(self, settings: tuple[float, int, float], drafting: Drafting, num_rows: int) -> None:
        self.table = model_logits()
        self.settings = settings
        self.drafting = drafting
        self.drafter_numbers = torch.Generator().manual_seed(2)
        numbers = torch.Generator().manual_seed(3)  # one per position and purpose, as for requests
        self.uniforms = torch.rand(num_rows, NUM_POSITIONS, 3, dtype=torch.float64, generator=numbers)
        self.text = torch.full((num_rows, 1 + NUM_TOKENS + MAX_DRAFTS + 1), FIRST_TOKEN)
        self.lengths = torch.zeros(num_rows, dtype=torch.int64)
        self.num_accepted = 0

    def run(self) -> Tensor:
        """Generate text, and return the first tokens of each row, [rows, NUM_TOKENS]."""
        while (self.lengths < NUM_TOKENS).any():
            self._step()
        return self.text[:, 1 : 1 + NUM_TOKENS]

    def _step(self) -> None:
        rows = torch.arange(len(self.lengths))
        last = self.text.gather(1, self.lengths[:, None])
        drafts, distributions = self._draft(last[:, 0])
        columns = torch.arange(1 + MAX_DRAFTS)
        num_drafts = torch.minimum((rows + self.lengths) % (1 + MAX_DRAFTS), NUM_TOKENS - self.lengths).clamp_min(0)
        is_real = columns <= num_drafts[:, None]
        positions = (self.lengths[:, None] + columns)[is_real]
        of_row = rows[:, None].expand_as(is_real)[is_real]
        logits = self.table[torch.cat((last, drafts), dim=1)[is_real]]
        verify = VerifyLogits(
            torch.nn.functional.pad(is_real.sum(dim=1).cumsum(0), (1, 0)).int(),
            torch.nn.functional.pad(drafts, (0, 1))[is_real],
            MAX_DRAFTS,
        )
        samples = self.drafting.samples(rows)[:, None] & (columns < num_drafts[:, None])
        numbers = torch.where(samples, rows[:, None] * MAX_DRAFTS + columns, -1)[is_real]
        sampled = DraftDistributions(distributions.reshape(-1, VOCAB), numbers.int())
        self._append(self._verify(logits, self.uniforms[of_row, positions], verify, sampled))

    def _draft(self, token: Tensor) -> tuple[Tensor, Tensor]:
        drafts, distributions = [], []
        for _ in range(MAX_DRAFTS):
            distributions.append(self.drafting.proposal(self.table[token]))
            token = torch.multinomial(distributions[-1], 1, generator=self.drafter_numbers)[:, 0]
            drafts.append(token)
        return torch.stack(drafts, dim=1), torch.stack(distributions, dim=1)

    def _verify(self, logits: Tensor, uniforms: Tensor, verify: VerifyLogits, sampled: DraftDistributions) -> Tensor:
        rows = SamplingRows(logits, *(torch.full((len(logits),), value) for value in self.settings))
        tokens = sample_tokens(rows, uniforms[:, 0])
        if self.drafting.samples is no_rows:
            return accept_matching(tokens, verify)
        numbers = RatioUniforms(uniforms[:, 1], uniforms[:, 2])
        return accept_by_ratio(tokens, token_probabilities(rows), verify, sampled, numbers)

    def _append(self, result: Tensor) -> None:
        continues = self.lengths < NUM_TOKENS
        for column in range(1 + MAX_DRAFTS):
            is_emitted = (continues & (column < result[:, 0])).nonzero()[:, 0]
            self.text[is_emitted, 1 + self.lengths[is_emitted] + column] = result[is_emitted, 1 + column]
        self.lengths += torch.where(continues, result[:, 0], 0)
        self.num_accepted += int((result[:, 0] - 1)[continues].sum())


def exact_probabilities(settings: tuple[float, int, float], num_tokens: int) -> Tensor:
    """Return the probability of each continuation of `FIRST_TOKEN`, [vocab ** num_tokens]."""
    chain = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for token, logits in enumerate(model_logits().tolist()):
        for following, probability in kept_probabilities(logits, *settings).items():
            chain[token, following] = probability
    joint = chain[FIRST_TOKEN]
    for _ in range(num_tokens - 1):
        joint = (joint.reshape(-1, VOCAB, 1) * chain).flatten()
    return joint


def p_value(continuations: Tensor, probabilities: Tensor) -> float:
    """Return the p-value of a chi-square test; cells with low expected counts are merged."""
    expected = probabilities * len(continuations)
    powers = VOCAB ** torch.arange(continuations.shape[1] - 1, -1, -1)
    found = torch.bincount((continuations * powers).sum(dim=1), minlength=len(expected)).double()
    if found[probabilities == 0].any():
        return 0.0
    order = expected.argsort()
    groups = (expected[order].cumsum(0) / 10).long()
    sums = torch.zeros(2, int(groups.max()) + 1, dtype=torch.float64)
    sums.index_add_(1, groups, torch.stack((expected[order], found[order])))
    sums = sums[:, sums[0] > 1]
    statistic = ((sums[1] - sums[0]).square() / sums[0]).sum()
    degrees = torch.tensor(sums.shape[1] - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2)) if degrees else 1.0


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_text_from_verified_drafts_has_the_models_distribution(
    settings: tuple[float, int, float], drafting: str
) -> None:
    continuations = Continuations(settings, DRAFTINGS[drafting], NUM_ROWS).run()
    for num_tokens in (1, 2, NUM_TOKENS):
        assert p_value(continuations[:, :num_tokens], exact_probabilities(settings, num_tokens)) > 0.001


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("drafting", ["always_wrong", "most_likely", "random", "mixed_rows"])
def test_draft_matching_gives_the_same_tokens_as_decoding_without_drafts(
    settings: tuple[float, int, float], drafting: str
) -> None:
    run = Continuations(settings, DRAFTINGS[drafting], 2000)
    text = run.run()
    plain = torch.full((2000, 1 + NUM_TOKENS), FIRST_TOKEN)
    for position in range(NUM_TOKENS):
        columns = [torch.full((2000,), value) for value in settings]
        logits = run.table[plain[:, position]]
        plain[:, position + 1] = sample_tokens(SamplingRows(logits, *columns), run.uniforms[:, position, 0])
    by_matching = ~DRAFTINGS[drafting].samples(torch.arange(2000))
    assert by_matching.any() and torch.equal(text[by_matching], plain[by_matching, 1:])


def test_drafts_closer_to_the_model_are_accepted_more_often() -> None:
    order = ["drawn_opposite", "drawn_uniform", "drawn_model_like"]
    runs = [Continuations(SETTINGS[0], DRAFTINGS[drafting], 2000) for drafting in order]
    for run in runs:
        run.run()
    accepted = [run.num_accepted for run in runs]
    assert 0 < 2 * accepted[0] < accepted[1] and 1.2 * accepted[1] < accepted[2]


def test_distribution_check_detects_wrong_draft_probabilities() -> None:
    class Liar(Continuations):
        def _draft(self, token: Tensor) -> tuple[Tensor, Tensor]:
            drafts, distributions = super()._draft(token)
            return drafts, 0.5 * distributions + 0.5 / VOCAB

    continuations = Liar(SETTINGS[0], DRAFTINGS["drawn_model_like"], NUM_ROWS).run()
    assert p_value(continuations, exact_probabilities(SETTINGS[0], NUM_TOKENS)) < 1e-6
