"""Reserve room in a tier for a boundary that is being copied there; then publish or cancel it."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ..identifiers import BlockId, BlockKey, SlotId
from ..pools import CachePools
from ..slot_owners import SlotOwner


@dataclass(frozen=True, slots=True)
class Arrival:
    """Boundary that is being copied to a tier; it can be neither found nor evicted until it is published.

    Args:
        keys: Keys of all blocks from the start of the text to the boundary.
        known: Leading blocks that the tier has already, which are held.
        new: Blocks reserved for the rest.
        slot: Slot reserved for the state.
    """

    keys: tuple[BlockKey, ...]
    known: tuple[BlockId, ...]
    new: tuple[BlockId, ...]
    slot: SlotId


def has_state(pools: CachePools, key: BlockKey | None) -> bool:
    """Return whether a tier has the state at the end of the block with this key."""
    block = None if key is None else pools.kv.find(key)
    return block is not None and pools.slots.slot_of(block) is not None


def expect(pools: CachePools, keys: Sequence[BlockKey]) -> Arrival:
    """Reserve room for the boundary at the end of a text's blocks; evict states of lowest priority if needed.

    Raises:
        CacheCapacityError: If there is no room; states may have been evicted then.
    """
    known = pools.kv.longest_match(keys)
    with ExitStack() as undo:
        pools.kv.acquire(known)
        undo.callback(pools.kv.release, known)
        new = pools.kv.allocate(len(keys) - len(known))
        undo.callback(pools.kv.release, new)
        (slot,) = pools.slots.reserve()
        undo.pop_all()
    return Arrival(tuple(keys), tuple(known), tuple(new), slot)


def publish(arrival: Arrival, pools: CachePools, block_size: int) -> list[BlockId]:
    """Make a boundary findable after its bytes have arrived; return its blocks from the start of the text, all held.

    Blocks registered meanwhile replace the copied ones. If this raises, the room is released.
    """
    held, kv, slots = list(arrival.known), pools.kv, pools.slots
    try:
        for block, key in zip(arrival.new, arrival.keys[len(held) :], strict=True):
            held.append(kv.register(block, key, held[-1] if held else None))
        end = held[-1]
        if slots.slot_of(end) is None:
            depth = slots.deepest(held)
            anchor = held[depth - 1] if depth else None
            slots.publish(arrival.slot, end, len(held) * block_size, anchor, kv.num_children(end))
        else:
            slots.cancel(arrival.slot)
    except BaseException:
        if slots.owner_of(arrival.slot) is SlotOwner.RESERVED:
            slots.cancel(arrival.slot)
        kv.release([*held, *arrival.new[len(held) - len(arrival.known) :]])
        raise
    return held


def cancel(arrival: Arrival, pools: CachePools) -> None:
    """Release the room."""
    pools.slots.cancel(arrival.slot)
    pools.kv.release([*arrival.known, *arrival.new])
