"""Estimate the time of a decode step from the bytes that it reads, to decide on the number of drafts.

A dense layer reads all its weights even for one token, so draft tokens are almost free there. An MoE layer reads only
the experts to which tokens are routed, so five tokens read nearly five times as many experts as one token. Times are
estimated, not measured, so that all ranks of a model plan the same drafts.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Speed of a device. Only the ratios of these values matter for draft counts.

    Args:
        bytes_per_s: Memory bandwidth in bytes per second.
        macs_per_s: Multiply-adds per second.
        layer_s: Fixed overhead per layer, in seconds.
        drafts_s: Extra host latency of a step with drafts, in seconds: the step can only be launched after the tokens
            of the previous step have been read.
    """

    bytes_per_s: float
    macs_per_s: float
    layer_s: float
    drafts_s: float


GPU = DeviceSpeed(4.3e12, 3.4e14, 12e-6, 0.9e-3)
"""Speed of an H200; see `benchmarks/results/speculation.md`."""
CPU = DeviceSpeed(1e10, 3e9, 7e-4, 5e-4)
"""Speed of two CPU cores, where call overhead and arithmetic dominate."""


@dataclass(frozen=True, slots=True)
class StepReads:
    """Bytes that a decode step reads on a rank, by part of the model; equal on all ranks.

    Args:
        num_layers: Number of layers in the model.
        weights: Bytes of the weights that every step reads, including the output layer.
        expert: Bytes of one expert, summed over the MoE layers.
        num_experts: Number of experts per layer on a rank; 0 if the model has no MoE layers.
        chosen: Fraction of a layer's experts to which each token is routed: top-k / number of experts.
        num_expert_ranks: Number of ranks whose tokens may be routed to the experts on one rank.
        state: Bytes of the recurrent states of one request.
        draft: Bytes read and written per draft token.
        cached_token: Bytes of the keys and values of one token in the KV cache.
        macs: Number of multiply-adds per token.
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
        """Return the expected number of experts per layer that a rank reads, if tokens are routed independently."""
        return self.num_experts * (1 - (1 - self.chosen) ** (num_tokens * self.num_expert_ranks))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Estimates the time of a decode step from its reads and the speed of the device.

    Args:
        width: Number of tokens per request to which a step with drafts is padded for its CUDA graph; 0 for no padding.
    """

    reads: StepReads
    device: DeviceSpeed
    width: int = 0

    def seconds(self, num_requests: int, num_drafts: int, num_cached: int = 0) -> float:
        """Return the estimated seconds for a step.

        Args:
            num_drafts: Total number of draft tokens.
            num_cached: Total number of cached tokens that attention reads.
        """
        reads, device = self.reads, self.device
        num_bytes = reads.weights + reads.expert * reads.experts_hit(num_requests + num_drafts)
        num_bytes += num_requests * reads.state + num_drafts * reads.draft + num_cached * reads.cached_token
        num_computed = num_requests * self.width if self.width and num_drafts else num_requests + num_drafts
        busy = max(num_bytes / device.bytes_per_s, num_computed * reads.macs / device.macs_per_s)
        return busy + reads.num_layers * device.layer_s + (device.drafts_s if num_drafts else 0.0)
