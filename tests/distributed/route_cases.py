"""Functions that run on a rank: routed experts recorded by a sharded model."""

import numpy as np
import numpy.typing as npt

from tests.distributed.rank_models import Layout, parallel
from tests.mcore import engine_runs
from tests.mcore.engine_runs import EngineRun, cache_config, some_tokens, tiny_sizes
from tests.mcore.routes import compare_routes


def routes(layout: Layout) -> npt.NDArray[np.int16]:
    """Return the routes of a request that hits the cache, after comparing all with the oracle."""
    with parallel(layout):
        subject = engine_runs.hybrid(tiny_sizes(pattern="MEM*E"))
        run = EngineRun.start(subject, cache_config(subject.sizes, max_tokens=24, record_routes=True))
        run.add(0, some_tokens(50), 6)
        run.finish()
        run.add(1, [*some_tokens(50), 3, 4], 6)
        run.add(2, some_tokens(20, seed=1), 6)
        run.finish()
        compared, num_tokens = compare_routes(run)
        assert compared > num_tokens // 2 and run.engine.cached_tokens(1) > 0
        return run.finished[1].routed_experts


def refusal(layout: Layout) -> str:
    """Return the error of an engine that would record routes."""
    with parallel(layout):
        subject = engine_runs.hybrid(tiny_sizes(pattern="MEM*E"))
        try:
            EngineRun.start(subject, cache_config(subject.sizes, record_routes=True))
        except ValueError as error:
            return str(error)
    return ""
