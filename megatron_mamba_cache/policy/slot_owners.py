"""Record of the use of each state slot."""

from collections.abc import Sequence
from enum import Enum
from typing import cast

from ..errors import CacheIntegrityError
from .identifiers import SlotId
from .index_pools import IndexPool


class SlotOwner(Enum):
    """Use of a state slot."""

    FREE = "free"
    LIVE = "live"
    RESERVED = "reserved"
    CACHED = "cached"
    DRAFT = "draft"

    __hash__ = object.__hash__  # faster than Enum's own, which hashes the name in Python


class SlotOwners:
    """Owner of each slot; all slots are free at first."""

    def __init__(self, indices: IndexPool) -> None:
        self.indices = indices
        self._owners = [SlotOwner.FREE] * indices.num_indices
        self._counts = dict.fromkeys(SlotOwner, 0)

    def count(self, owner: SlotOwner) -> int:
        """Return the number of slots with this owner; for FREE, the number that can be taken now."""
        return self.indices.num_free if owner is SlotOwner.FREE else self._counts[owner]

    def owner_of(self, slot: SlotId) -> SlotOwner:
        """Return the owner of the slot."""
        return self._owners[slot]

    def take(self, num_slots: int, owner: SlotOwner) -> list[SlotId]:
        """Assign `num_slots` free slots to an owner; the caller ensures that there are enough."""
        slots = cast("list[SlotId]", self.indices.take(num_slots))
        for slot in slots:
            self._owners[slot] = owner
        self._counts[owner] += num_slots
        return slots

    def hand_over(self, slot: SlotId, owner: SlotOwner, new_owner: SlotOwner) -> None:
        """Change the owner of a slot.

        Raises:
            ValueError: If there is no such slot.
            CacheIntegrityError: If the slot does not belong to `owner`; nothing is changed then.
        """
        if not 0 <= slot < len(self._owners):  # a padding slot of -1 would silently index the last slot
            raise ValueError(f"the slot must be between 0 and {len(self._owners) - 1}, found {slot}")
        if self._owners[slot] is not owner:
            raise CacheIntegrityError(f"slot {slot} must be {owner.value}, but is {self._owners[slot].value}")
        self._counts[owner] -= 1
        self._counts[new_owner] += 1
        self._owners[slot] = new_owner

    def free(self, slot: SlotId, owner: SlotOwner, *, is_fixed: bool = True) -> None:
        """Free a slot that has this owner; raise as `hand_over` does. Pass `is_fixed=False` if it was evictable."""
        self.hand_over(slot, owner, SlotOwner.FREE)
        if is_fixed:
            self.indices.unfix(slot)
        self.indices.release(slot)

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless the counts match the owners. O(n)."""
        found = {owner: self._owners.count(owner) for owner in SlotOwner if owner is not SlotOwner.FREE}
        counted = {owner: self._counts[owner] for owner in found}
        if found != counted:
            raise CacheIntegrityError(f"the slot counts by owner are {counted}, but must be {found}")

    def check_owned(self, owner: SlotOwner, slots: Sequence[SlotId]) -> None:
        """Raise `CacheIntegrityError` unless `slots`, in any order, are exactly the slots with this owner. O(n)."""
        owned = [slot for slot, found in enumerate(self._owners) if found is owner]
        if sorted(slots) != owned:
            raise CacheIntegrityError(f"slots {sorted(slots)} are listed as {owner.value}, but slots {owned} are")
