"""Compare all lists of Megatron's records of finished requests with those of another run."""

from collections.abc import Mapping
from typing import Any

import pytest
from megatron.core.inference.inference_request import DynamicInferenceEventType, Status

from tests.mcore.engine_runs import EngineRun

TOLERANCE = 1e-4


def assert_same_lists(run: EngineRun, others: Mapping[int, Any]) -> None:
    """Assert that each request has the lists of an undisturbed run, as long as the reply, and ended once.

    Args:
        others: The same requests, merged, of that run.
    """
    for request_id, request in run.finished.items():
        wanted = others[request_id]
        assert request.generated_tokens == wanted.generated_tokens, request_id
        assert len(request.tpot) == len(request.generated_tokens)
        drafts = run.engine.draft_counts(request_id)
        assert drafts.accepted == request.tpot.count(0.0) <= drafts.drafted
        assert [event.type for event in request.events].count(DynamicInferenceEventType.FINISH) == 1
        assert request.status is Status.COMPLETED and request.generated_text is not None
        for name in ("prompt_log_probs", "generated_log_probs"):
            found = getattr(request, name)
            assert (found or None) == pytest.approx(getattr(wanted, name) or None, abs=TOLERANCE), (request_id, name)
        for name in ("prompt_top_n_logprobs", "generated_top_n_logprobs"):
            found, expected = getattr(request, name) or [], getattr(wanted, name) or []
            assert [list(named) for named in found] == [list(named) for named in expected], (request_id, name)
            for named, same in zip(found, expected, strict=True):
                assert named == pytest.approx(same, abs=TOLERANCE)
