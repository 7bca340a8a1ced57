"""How long a decode step takes, reckoned from what it reads: with it a planner weighs what drafts cost.

A step of few tokens reads all weights of dense layers whatever it computes, so that drafts are almost free there. Of a
mixture of experts it reads those that its tokens choose: five tokens of one request read nearly five times the experts
of one. Times are reckoned and not measured, so that all ranks of a model plan the same drafts.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """What a step's time is made of; only ratios of times matter, and they differ little between cards of one kind.

    Args:
        bytes_per_s: At which weights and states are read.
        macs_per_s: Of a token and a weight.
        layer_s: What each layer takes besides.
        drafts_s: What a step with drafts waits for the host: it cannot be launched before the tokens that it follows
            are read.
    """

    bytes_per_s: float
    macs_per_s: float
    layer_s: float
    drafts_s: float


GPU = DeviceSpeed(4.3e12, 3.4e14, 12e-6, 0.9e-3)
"""An H200; see `benchmarks/results/draft_chances.md`."""
CPU = DeviceSpeed(1e10, 3e9, 7e-4, 5e-4)
"""Two cores, whose steps take as long as their calls and their products."""


@dataclass(frozen=True, slots=True)
class StepReads:
    """What a decode step of a whole model reads on a rank, in bytes; the same on all ranks of the model.

    Args:
        num_layers: Of the model.
        weights: Of all that every token is multiplied with, the output layer included.
        expert: Of one expert of each layer that has experts.
        num_experts: Experts of a layer on a rank; 0 if the model has none.
        chosen: Share of a layer's experts that a token chooses.
        num_expert_ranks: Ranks whose tokens choose among a rank's experts.
        row: A request's states.
        draft: What each draft of a request reads and writes besides.
        cached_token: Keys and values of a token in the KV cache.
        products: Weights that a token is multiplied with.
    """

    num_layers: int
    weights: int
    expert: int
    num_experts: int
    chosen: float
    num_expert_ranks: int
    row: int
    draft: int
    cached_token: int
    products: int

    def experts_hit(self, num_tokens: int) -> float:
        """Return how many experts of a layer some tokens read on a rank, if they choose independently."""
        return self.num_experts * (1 - (1 - self.chosen) ** (num_tokens * self.num_expert_ranks))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Reckons the time of decode steps.

    Args:
        reads: Of the model.
        device: That it runs on.
        width: Tokens of each row that a step computes if any row has drafts, as captured steps are padded to it; 0: a
            step computes the tokens that it has.
    """

    reads: StepReads
    device: DeviceSpeed
    width: int = 0

    def seconds(self, num_rows: int, num_drafts: int, num_cached: int = 0) -> float:
        """Return the seconds of a step.

        Args:
            num_drafts: Of all rows.
            num_cached: Tokens of all rows in the KV cache.
        """
        reads, device = self.reads, self.device
        num_bytes = reads.weights + reads.expert * reads.experts_hit(num_rows + num_drafts)
        num_bytes += num_rows * reads.row + num_drafts * reads.draft + num_cached * reads.cached_token
        num_computed = num_rows * self.width if self.width and num_drafts else num_rows + num_drafts
        busy = max(num_bytes / device.bytes_per_s, num_computed * reads.products / device.macs_per_s)
        return busy + reads.num_layers * device.layer_s + (device.drafts_s if num_drafts else 0.0)
