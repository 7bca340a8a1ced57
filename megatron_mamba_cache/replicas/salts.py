"""What a replica's block keys depend on, so that a coordinator computes the same keys as the replica."""

from dataclasses import dataclass

from ..policy.block_hashing import CacheSalt


@dataclass(frozen=True, slots=True)
class KeySalt:
    """The salt that a replica's block keys are chained from, without the tenant."""

    fingerprint: str
    weights_version: str
    epoch: int
    block_size: int

    def root_of(self, tenant: str) -> bytes:
        """Return the digest at the root of a tenant's chains."""
        return CacheSalt(self.fingerprint, self.weights_version, self.epoch, tenant).root()
