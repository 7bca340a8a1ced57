"""Reservation of space in a tier for a boundary that is being copied there."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ..identifiers import BlockId, BlockKey, SlotId
from ..pools import CachePools
from ..slot_owners import SlotOwner


@dataclass(frozen=True, slots=True)
class Arrival:
    """Space reserved in a tier for a boundary that is being copied there; not found or evicted until published.

    Args:
        keys: Keys of all blocks from the start of the text to the boundary.
        known: Leading blocks that the tier already had; a reference is held on each.
        new: Blocks allocated for the remaining keys.
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
    """Reserve space for the boundary at the end of the blocks with these keys; evict states if needed.

    Raises:
        CacheCapacityError: If there is too little space; some states may have been evicted.
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
    """Let prompts find a copied boundary; return its blocks from the start of the text, each with a reference.

    If a block with the same key was registered during the copy, it replaces the copied block. If this function raises,
    the space is released.
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
    """Release the space reserved for a boundary."""
    pools.slots.cancel(arrival.slot)
    pools.kv.release([*arrival.known, *arrival.new])
