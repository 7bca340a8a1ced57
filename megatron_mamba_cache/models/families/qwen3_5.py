"""Qwen3.5, 3.6 and 3.8 checkpoints, dense or MoE: Qwen3-Next's layers, with a separate tensor per projection."""

from ..architecture import HybridArchitecture
from ..checkpoints.stored_names import OtherNames
from ..placement import Placement, Split
from .layer_placements import Placements, in_proj_sections
from .qwen3_next import ENDS, STACKS, architecture_of, mtp_pattern, mtp_placements, placements_with, section_view

__all__ = ["ENDS", "OTHER_NAMES", "architecture_of", "mtp_pattern", "mtp_placements", "placements_of"]

OTHER_NAMES = OtherNames(
    parts={"model.": ("model.language_model.", "")},  # transformers 5.3 always writes the longer prefix
    stacks=STACKS,
    left_out=("model.visual.",),
)


def placements_of(architecture: HybridArchitecture) -> Placements:
    """Return the Megatron destinations of each tensor in a Qwen3.5 checkpoint."""
    return placements_with(architecture, _projections)


def _projections(architecture: HybridArchitecture, in_proj: str, prefix: str) -> Placements:
    qkv = Split(0, in_proj_sections(architecture)[:3])
    return {
        f"{prefix}in_proj_qkv.weight": (Placement(in_proj, qkv, view=section_view(architecture, 0, 3)),),
        f"{prefix}in_proj_z.weight": (Placement(in_proj, Split(0), view=section_view(architecture, 3, 4)),),
        f"{prefix}in_proj_b.weight": (Placement(in_proj, Split(0), view=section_view(architecture, 4, 5)),),
        f"{prefix}in_proj_a.weight": (Placement(in_proj, Split(0), view=section_view(architecture, 5, 6)),),
    }
