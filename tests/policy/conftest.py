from functools import partial

import pytest

from tests.policy.small_cache import NewCache, small_cache


@pytest.fixture(params=[None, (32, 1, 1), (16, 2, 3)], ids=["split", "slabs_of_one", "slabs_of_few"])
def new_cache(request: pytest.FixtureRequest) -> NewCache:
    """Return a function that creates a cache with enough room, in separate or in shared memory."""
    return partial(small_cache, slabs=request.param)
