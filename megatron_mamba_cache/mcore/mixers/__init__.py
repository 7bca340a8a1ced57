"""Mixers of recurrent layers: projections, norm and gate around a recurrence."""

from megatron.core.ssm.mamba_mixer import MambaMixer

from .mamba2 import CachingMambaMixer

CACHING_MIXERS = {MambaMixer: CachingMambaMixer}
"""The mixer that takes the place of one of Megatron's."""
