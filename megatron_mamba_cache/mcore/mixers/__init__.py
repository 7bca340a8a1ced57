"""Mixers for recurrent layers: projections, norm and gate around a recurrence."""

from megatron.core.ssm.mamba_mixer import MambaMixer

from .gated_delta import GatedDeltaMixer
from .mamba2 import CachingMambaMixer

CACHING_MIXERS = {MambaMixer: CachingMambaMixer, GatedDeltaMixer: GatedDeltaMixer}
"""The mixer to build for one that a spec names: Megatron's, or ours that Megatron has no counterpart of."""
