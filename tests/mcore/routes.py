"""Comparison of recorded routes with the oracle's."""

import numpy as np

from tests.mcore.engine_runs import EngineRun
from tests.oracle import ROUTING_MARGIN


def compare_routes(run: EngineRun) -> tuple[int, int]:
    """Assert that the finished requests' routes are the oracle's; return the numbers of compared and all tokens."""
    num_compared = num_tokens = 0
    for request_id, request in run.finished.items():
        text, found = run.prompts[request_id] + run.tokens(request_id), request.routed_experts
        expected, gaps = run.subject.oracle.experts(text)
        assert found.dtype == np.int16 and found.shape == expected.shape
        assert (found[-1] == -1).all() and (found[:-1] >= 0).all()
        sure = (gaps >= ROUTING_MARGIN).cpu().numpy()[:-1]
        differs = (np.sort(found[:-1], -1) != expected.cpu().numpy()[:-1]).any((1, 2)) & sure
        assert not differs.any(), f"request {request_id}: tokens {np.flatnonzero(differs)} of {len(text)} differ"
        num_compared, num_tokens = num_compared + int(sure.sum()), num_tokens + len(sure)
    return num_compared, num_tokens
