"""What a replica's block keys depend on, so that a coordinator can name a prompt's blocks as the replica does."""

from dataclasses import dataclass

from ..policy.block_hashing import CacheSalt


@dataclass(frozen=True, slots=True)
class KeySalt:
    """What a replica's block keys are chained under, but for the tenant."""

    fingerprint: str
    weights_version: str
    epoch: int
    block_size: int

    def root_of(self, tenant: str) -> bytes:
        """Return the digest that a tenant's chains start from."""
        return CacheSalt(self.fingerprint, self.weights_version, self.epoch, tenant).root()
