"""Estimate the time of a decode step from what it reads, to weigh the cost of drafts.

A step of few tokens reads all weights of dense layers, so drafts are almost free there. A mixture of experts reads only
the chosen experts: five tokens of one request read nearly five times the experts of one. Times are estimated, not
measured, so that all ranks of a model plan the same drafts.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """The speed of a device; only ratios matter, and they differ little between cards of one kind.

    Args:
        bytes_per_s: Memory bandwidth.
        macs_per_s: Multiply-adds per second.
        layer_s: Fixed overhead of each layer.
        drafts_s: Host latency of a step with drafts, which cannot be launched before its predecessor's tokens are read.
    """

    bytes_per_s: float
    macs_per_s: float
    layer_s: float
    drafts_s: float


GPU = DeviceSpeed(4.3e12, 3.4e14, 12e-6, 0.9e-3)
"""An H200; see `benchmarks/results/speculation.md`."""
CPU = DeviceSpeed(1e10, 3e9, 7e-4, 5e-4)
"""Two cores, whose steps take as long as their calls and their macs."""


@dataclass(frozen=True, slots=True)
class StepReads:
    """Bytes that a decode step of a whole model reads on a rank; the same on all ranks of the model.

    Args:
        num_layers: Layers of the model.
        weights: Weights that every token reads, the output layer included.
        expert: One expert of each layer that has experts.
        num_experts: Experts of a layer on a rank; 0 if the model has none.
        chosen: Share of a layer's experts that a token chooses.
        num_expert_ranks: Ranks whose tokens choose among a rank's experts.
        state: The states of a request.
        draft: Read and written for each draft of a request.
        cached_token: Keys and values of a token in the KV cache.
        macs: Multiply-adds of a token; not bytes.
    """

    num_layers: int
    weights: int
    expert: int
    num_experts: int
    chosen: float
    num_expert_ranks: int
    state: int
    draft: int
    cached_token: int
    macs: int

    def experts_hit(self, num_tokens: int) -> float:
        """Return the expected number of experts of a layer that some tokens read on a rank, chosen independently."""
        return self.num_experts * (1 - (1 - self.chosen) ** (num_tokens * self.num_expert_ranks))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Estimates the time of decode steps.

    Args:
        width: Tokens computed for each request if any has drafts, as captured steps are padded to it; 0 for no padding.
    """

    reads: StepReads
    device: DeviceSpeed
    width: int = 0

    def seconds(self, num_requests: int, num_drafts: int, num_cached: int = 0) -> float:
        """Return the seconds of a step, from all requests' drafts and tokens in the KV cache."""
        reads, device = self.reads, self.device
        num_bytes = reads.weights + reads.expert * reads.experts_hit(num_requests + num_drafts)
        num_bytes += num_requests * reads.state + num_drafts * reads.draft + num_cached * reads.cached_token
        num_computed = num_requests * self.width if self.width and num_drafts else num_requests + num_drafts
        busy = max(num_bytes / device.bytes_per_s, num_computed * reads.macs / device.macs_per_s)
        return busy + reads.num_layers * device.layer_s + (device.drafts_s if num_drafts else 0.0)
