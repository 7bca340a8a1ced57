"""How fast this rank copies and prefills: the best of what it has seen while it served."""

from ..policy.tiers.copies import Lane
from ..policy.tiers.times import CopyTimes

_LEAST_BYTES = 2**22
_LEAST_TOKENS = 256


class MeasuredTimes:
    """Keeps the least time for a byte of each lane and for a prompt token; of small copies and steps, nothing.

    What has not been copied to the device or read from the disk yet is taken to be as fast as the other way.
    """

    def __init__(self) -> None:
        self._byte_s: dict[Lane, float] = {}
        self._token_s: float | None = None

    def note_copy(self, lane: Lane, num_bytes: int, seconds: float) -> None:
        """Note a copy that has been made."""
        if num_bytes >= _LEAST_BYTES:
            self._byte_s[lane] = min(seconds / num_bytes, self._byte_s.get(lane, float("inf")))

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note a step that has computed prompt tokens and nothing else."""
        if num_tokens >= _LEAST_TOKENS:
            self._token_s = min(seconds / num_tokens, self._token_s or float("inf"))

    def times(self, block_bytes: int, state_bytes: int) -> CopyTimes | None:
        """Return the times of a block and a state of these sizes; None until a copy and a prefill have been seen."""
        copy, read = self._of_either(Lane.TO_DEVICE, Lane.TO_HOST), self._of_either(Lane.FROM_DISK, Lane.TO_DISK)
        if copy is None or self._token_s is None:
            return None
        read = read or 0.0
        return CopyTimes(
            block=round(copy * block_bytes * 1e9),
            state=round(copy * state_bytes * 1e9),
            token=max(round(self._token_s * 1e9), 1),
            disk_block=round(read * block_bytes * 1e9),
            disk_state=round(read * state_bytes * 1e9),
        )

    def _of_either(self, lane: Lane, other: Lane) -> float | None:
        return self._byte_s.get(lane, self._byte_s.get(other))
