"""Conv windows copied tile by tile, some inputs to the left, from slots and from beside the rings of their rows."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .draft_inputs import DraftInputs
from .slot_tiles import CopyTiling, SlotStates, SlotTiles, access_bytes, cut_slots


@triton.jit
def copy_windows(
    states,
    target_states,
    behind,
    source,
    target,
    shift,
    ring,
    first_tile,
    LAYERS: tl.constexpr,
    TIMES: tl.constexpr,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy every n-th tile from `first_tile` on, n programs, of the window in slot `source`, from input `shift` on.

    All layers. Slots are int64; `target` is one of `target_states`, which may be `states`, and then the slots may be
    equal.

    Args:
        behind: Where the inputs from TIMES on are, at `ring`; None: in the slot as well.
    """
    TILES: tl.constexpr = (LENGTH + WIDTH - 1) // WIDTH
    time = tl.arange(0, triton.next_power_of_2(TIMES))[:, None]
    # Multiplying by LANES last tells the compiler that every address is aligned to LANES elements.
    from_slot = (source * states.slot_stride + shift * states.time_stride) * LANES
    to_slot = target * target_states.slot_stride * LANES
    for tile in range(first_tile, LAYERS * TILES, tl.num_programs(0)):
        layer = tl.cast(tile // TILES, tl.int64)
        element = tile % TILES * WIDTH + tl.arange(0, WIDTH)[None, :]
        sources = states.first + layer * states.layer_stride * LANES + from_slot
        sources += time * states.time_stride * LANES + element  # [TIMES, WIDTH]
        targets = target_states.first + layer * target_states.layer_stride * LANES + to_slot
        targets += time * target_states.time_stride * LANES + element
        inside = (time < TIMES) & (element < LENGTH)
        if behind is None:
            values = tl.load(sources, mask=inside)
        else:
            is_behind = shift + time >= TIMES
            from_ring = (ring * behind.slot_stride + (shift - TIMES) * behind.time_stride) * LANES
            later = behind.first + layer * behind.layer_stride * LANES + from_ring
            later += time * behind.time_stride * LANES + element
            values = tl.where(
                is_behind, tl.load(later, mask=inside & is_behind), tl.load(sources, mask=inside & ~is_behind)
            )
        tl.debug_barrier()  # a write may overwrite what another thread of this program reads
        tl.store(targets, values, mask=inside)


class WindowTiles(NamedTuple):
    """What `copy_windows` takes of windows in slots and beside rings, and of where they go; see `SlotTiles`."""

    sources: SlotTiles
    targets: SlotTiles
    behind: SlotStates | None

    @property
    def sizes(self) -> dict[str, int]:
        """The compile-time sizes, by the kernels' names."""
        cut = self.targets
        return {
            "CONV_TIMES": cut.times,
            "CONV_LENGTH": cut.length,
            "CONV_LANES": cut.lanes,
            "CONV_WIDTH": cut.width,
        }


def cut_windows(sources: Tensor, targets: Tensor, drafts: DraftInputs | None, tiling: CopyTiling) -> WindowTiles:
    """Cut pools [layers, slots, window, conv_dim] of as many inputs, and what is beside rings, into tiles alike."""
    behind = None if drafts is None else drafts.inputs
    access = min(access_bytes(pool) for pool in (sources, targets, behind) if pool is not None)
    return WindowTiles(
        cut_slots(sources, tiling, access),
        cut_slots(targets, tiling, access),
        None if behind is None else cut_slots(behind, tiling, access).states,
    )
