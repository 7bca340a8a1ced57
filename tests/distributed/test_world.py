"""Reports of tests whose ranks fail or hang."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.world import SpawnedWorld, is_rank


def fail_or_wait(failing_rank: int) -> None:
    """Raise on one rank; wait on the others for a collective that it never joins."""
    if dist.get_rank() == failing_rank:
        raise ArithmeticError("this rank fails")
    dist.all_reduce(torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu"))


@pytest.mark.skipif(is_rank(), reason="starts ranks of its own")
def test_first_failing_rank_is_reported_immediately() -> None:
    world = SpawnedWorld(2)
    began = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        world.run(fail_or_wait, 1)
    assert time.monotonic() - began < 120
    assert world.is_closed
    message = str(failure.value)
    assert "rank 1:\nTraceback" in message and "ArithmeticError: this rank fails" in message
    assert "rank 0:\n" in message and "fail_or_wait" in message[message.index("rank 0:\n") :]
