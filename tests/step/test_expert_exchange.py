"""Exchanges that a failed forward pass has made are not repeated when the step is completed with padding."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_mamba_cache.step.expert_exchange import ExpertExchange

NUM_RANKS, NUM_EXCHANGED, WIDTH = 2, 3, 4
OF_PEER = 7.0


class Failed(Exception):
    """Error raised in a forward pass."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Simulate a second rank with real tokens and the values `OF_PEER`; return the list of exchanges made."""
    calls: list[str] = []

    def all_gather(out: torch.Tensor, x: torch.Tensor, group: object) -> None:
        calls.append("gather")
        out[: len(x)], out[len(x) :] = x, OF_PEER

    def all_to_all(out: torch.Tensor, x: torch.Tensor, group: object) -> None:
        calls.append("combine")
        out.fill_(OF_PEER)

    monkeypatch.setattr(dist, "get_world_size", lambda group: NUM_RANKS)
    monkeypatch.setattr(dist, "all_gather_into_tensor", all_gather)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    return calls


def forward(exchange: ExpertExchange, batch: SimpleNamespace, fails_after: int | None = None) -> list[torch.Tensor]:
    """Compute two MoE layers; return the mask of real tokens of each. Raise before the exchange `fails_after`."""
    found = []
    num_left = [fails_after]

    def exchanging() -> None:
        if num_left[0] is not None:
            if num_left[0] == 0:
                raise Failed
            num_left[0] -= 1

    with exchange.counted():
        for layer in range(2):
            if layer == 0:
                exchanging()
            found.append(exchange.real_tokens(batch))
            exchanging()
            everyone = exchange.gather(torch.ones(NUM_EXCHANGED, WIDTH), NUM_EXCHANGED)
            exchanging()
            exchange.combine(everyone, NUM_EXCHANGED, None)
    return found


@pytest.mark.parametrize("fails_after", range(5))
def test_resumed_forward_pass_does_not_repeat_expert_exchanges(fails_after: int, made: list[str]) -> None:
    exchange = ExpertExchange(None)
    whole = ["gather", "gather", "combine", "gather", "combine"]
    forward(exchange, batch_of(1))  # another step
    assert made == whole
    made.clear()
    with pytest.raises(Failed):
        forward(exchange, batch_of(1), fails_after)
    assert made == whole[:fails_after]
    with exchange.resuming() as any_made:
        found = forward(exchange, batch_of(0))
    assert any_made == (fails_after > 0)
    assert made == whole
    for real in found:  # this rank's experts still compute the other rank's tokens
        assert (real[NUM_EXCHANGED:] == OF_PEER).all()
    made.clear()
    forward(exchange, batch_of(1))
    assert made == whole


def batch_of(is_real: int) -> SimpleNamespace:
    real = torch.full((NUM_EXCHANGED,), is_real, dtype=torch.int32)
    return SimpleNamespace(real_tokens=real, num_exchanged=NUM_EXCHANGED)
