"""Log-probabilities of the oracle, and comparisons with them."""

from collections.abc import Sequence

import pytest
import torch

from tests.mcore.engine_runs import EngineRun

TOLERANCE = 1e-4


def oracle_log_probs(run: EngineRun, request_id: int) -> torch.Tensor:
    """Return the log-probs of the vocabulary after each token of a request's prompt and reply."""
    return run.subject.oracle.logits(run.prompts[request_id] + run.tokens(request_id)).log_softmax(-1)


def assert_log_probs(run: EngineRun, request_id: int) -> None:
    """Assert that the request's prompt and generated log-probs equal the oracle's."""
    request = run.finished[request_id]
    text = torch.tensor(run.prompts[request_id] + run.tokens(request_id))
    wanted = oracle_log_probs(run, request_id).cpu()[:-1].gather(1, text[1:, None])[:, 0].tolist()
    num_prompt = len(run.prompts[request_id]) - 1
    assert request.prompt_log_probs == pytest.approx(wanted[:num_prompt], abs=TOLERANCE)
    assert request.generated_log_probs == pytest.approx(wanted[num_prompt:], abs=TOLERANCE)


def assert_top_n(found: Sequence[dict[str, float]], log_probs: torch.Tensor) -> None:
    """Assert that the found tokens and log-probs are the best three of each row of `log_probs`."""
    assert len(found) == len(log_probs)
    for named, row in zip(found, log_probs, strict=True):
        best = row.topk(3)
        assert [int(token) for token in named] == best.indices.tolist()
        assert list(named.values()) == pytest.approx(best.values.tolist(), abs=TOLERANCE)
