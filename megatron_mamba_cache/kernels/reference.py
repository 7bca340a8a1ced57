"""The reference twins of the state kernels, in one place: torch only, same signatures, same in-place effects."""

from .conv.reference_conv import causal_conv_ref, conv_verify_ref
from .slots.reference_align import align_copy_ref
from .slots.reference_slots import copy_slots_ref, zero_slots_ref
from .ssm.reference_replay import fold_boundaries_ref, state_replay_ref
from .ssm.reference_ssd import ssd_scan_ref, state_verify_ref

__all__ = [
    "align_copy_ref",
    "causal_conv_ref",
    "conv_verify_ref",
    "copy_slots_ref",
    "fold_boundaries_ref",
    "ssd_scan_ref",
    "state_replay_ref",
    "state_verify_ref",
    "zero_slots_ref",
]
