"""Mixers for recurrent layers: projections, norm and gate around a recurrence."""

from megatron.core.ssm.mamba_mixer import MambaMixer

from .gated_delta import GatedDeltaMixer
from .mamba2 import CachingMambaMixer

CACHING_MIXERS = {MambaMixer: CachingMambaMixer, GatedDeltaMixer: GatedDeltaMixer}
"""Caching mixer class for each mixer class in a spec; Megatron has no Gated DeltaNet mixer that could be replaced."""
