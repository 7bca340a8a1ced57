"""Benchmark steps with replayed states for one layer, with the ring lengths of requests under a steady load."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_mamba_cache.recurrences.batches import ReplayBatch
from megatron_mamba_cache.recurrences.gated_delta.replay.reference import delta_replay_ref
from megatron_mamba_cache.recurrences.mamba2.replay.reference import state_replay_ref
from megatron_mamba_cache.recurrences.replay.ring import ReplayRing, least_capacity, least_x_capacity

Replay = Callable[[Any, Any, Tensor, ReplayRing, ReplayBatch, int], Tensor]


def steady_rows(num_rows: int, first_slot: int, ring_len: int, kept: int, num_tokens: int, device: str) -> ReplayBatch:
    """Return requests of `num_tokens` tokens whose last steps each accepted `kept` tokens.

    Their ring lengths are spread evenly and in random order, as if the requests had arrived at random times.
    """
    row = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    slots = row[:-1] + first_slot
    phases = (
        torch.randperm(num_rows, generator=torch.Generator().manual_seed(num_rows)).to(slots) * ring_len // num_rows
    )
    computed = 8 * ring_len + phases
    folded = (computed - kept) // ring_len * ring_len
    return ReplayBatch(row * num_tokens, slots, slots, folded, computed, num_tokens)


class ReplayBench:
    """States, rings and steps of one layer; each launch folds as many requests as under a steady load.

    Args:
        tokens, weights: Arguments of the op.
        kept: Number of tokens that the last step of each request accepted.
        num_steps: Number of steps with their own states and rings.
    """

    def __init__(
        self,
        tokens: Any,
        weights: Any,
        dtype: torch.dtype,
        ring_len: int,
        *,
        num_rows: int,
        kept: int,
        num_steps: int,
    ) -> None:
        self.tokens, self.weights, self.ring_len = tokens, weights, ring_len
        values, keys = self._held(tokens)
        device, num_tokens = values.device, values.shape[0] // num_rows
        heads, head_dim = values.shape[1:]
        shape = (num_steps * num_rows, heads, keys.shape[2], head_dim)
        self.pool = torch.empty(shape, dtype=dtype, device=device).normal_()
        sizes = (num_steps * num_rows, least_capacity(ring_len, num_tokens))
        of_x = (num_steps * num_rows, least_x_capacity(ring_len, num_tokens))
        self.ring = ReplayRing(
            torch.randn(*of_x, heads, head_dim, device=device).to(values.dtype),
            torch.randn(*sizes, *keys.shape[1:], device=device).to(keys.dtype),
            self._random_steps(*sizes, 2, heads, device=device),
        )
        self.steps = [
            steady_rows(num_rows, number * num_rows, ring_len, kept, num_tokens, str(device))
            for number in range(num_steps)
        ]

    @staticmethod
    def _held(tokens: Any) -> tuple[Tensor, Tensor]:
        """Return tensors of the shape and dtype of a token's values and keys in the ring."""
        return tokens.x, tokens.B

    @staticmethod
    def _random_steps(*shape: int, device: torch.device) -> Tensor:
        """Return random factors of values and random log decays."""
        steps = torch.rand(*shape, device=device) * 0.1
        steps[:, :, 1] *= -1
        return steps

    @staticmethod
    def _reference(*arguments: Any) -> Tensor:
        return state_replay_ref(*arguments)

    def launches(self, replay: Replay) -> list[Callable[[], Tensor]]:
        """Return the launch of each step."""
        return [
            lambda rows=rows: replay(self.tokens, self.weights, self.pool, self.ring, rows, self.ring_len)
            for rows in self.steps
        ]

    def check(self, replay: Replay) -> None:
        """Compare the first step with the reference.

        Raises:
            RuntimeError: If outputs, states or rings are wrong.
        """
        rows = self.steps[0]
        number = rows.slots.shape[0]
        pool = self.pool[:number].clone()
        ring = ReplayRing(*(t[:number].clone() for t in (self.ring.x, self.ring.B, self.ring.steps)))
        expected = self._reference(self.tokens, self.weights, pool, ring, rows, self.ring_len)
        y = replay(self.tokens, self.weights, self.pool, self.ring, rows, self.ring_len)
        found = {"outputs": (y, expected), "states": (self.pool[:number], pool)}
        found |= {name: (getattr(self.ring, name)[:number], getattr(ring, name)) for name in ("x", "B", "steps")}
        for name, (mine, its) in found.items():
            error = (mine.float() - its.float()).abs().max() / its.float().abs().max()
            if not error < 0.02:
                raise RuntimeError(f"{name} differ from the reference by {error:.2e}")


class DeltaReplayBench(ReplayBench):
    """The same for a Gated DeltaNet layer."""

    @staticmethod
    def _held(tokens: Any) -> tuple[Tensor, Tensor]:
        return tokens.v.float(), tokens.k

    @staticmethod
    def _random_steps(*shape: int, device: torch.device) -> Tensor:
        steps = torch.rand(*shape, device=device) * -0.1
        steps[:, :, 0] = 1
        return steps

    @staticmethod
    def _reference(*arguments: Any) -> Tensor:
        return delta_replay_ref(*arguments)
