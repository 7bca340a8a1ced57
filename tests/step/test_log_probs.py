"""Log-probabilities of the tokens that a step samples."""

from dataclasses import replace

import torch

from megatron_mamba_cache.policy.request_settings import LogProbSettings
from megatron_mamba_cache.step.batch import StepBatch
from megatron_mamba_cache.step.log_probs import SampledTokenScores
from tests.step.step_requests import decoding, lay_out

VOCAB = 4096


def laid_out(*top_n: int | None) -> StepBatch:
    """Return a step with one request for each number of top log-probabilities; None is a request without them."""
    settings = [LogProbSettings() if num is None else LogProbSettings(True, True, num) for num in top_n]
    requests = [decoding(index) for index in range(len(settings))]
    for request, asked in zip(requests, settings, strict=True):
        request.spec = replace(request.spec, log_probs=asked)
    return lay_out(requests, "cpu")


def test_log_probs_of_a_request_do_not_depend_on_other_requests() -> None:
    """Many logits are equal, so that ties must be broken."""
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB).mul(4).round().bfloat16()
    outcome = torch.stack([torch.ones(4, dtype=torch.int64), logits.argmin(dim=1)], dim=1)
    together = SampledTokenScores(laid_out(5, None, 0, 20), outcome, logits).arrived()
    assert together.of_tokens is not None and together.best is not None
    expected = logits.float().log_softmax(-1)
    for index in (0, 2, 3):
        assert together.of_tokens[index] == [expected[index, logits[index].argmin()].item()]
    assert together.of_tokens[1] is None and set(together.best) == {0, 3}
    for index, num in ((0, 5), (3, 20)):
        alone = SampledTokenScores(laid_out(num), outcome[index : index + 1], logits[index : index + 1]).arrived()
        assert alone.best is not None
        for one, other in zip(together.best[index][0], alone.best[0][0], strict=True):
            assert one.tolist() == other.tolist() and len(one) == num
