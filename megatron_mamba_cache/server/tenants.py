"""Who asks: API keys, and the tenants whose prefixes are never shared."""

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose prefixes a request may share: of one API key, and there of one salt that the request may name.

    Args:
        owner: Digest of the API key; "" where the server has none.
        salt: The request's own `cache_salt`.
    """

    owner: str = ""
    salt: str = ""

    @property
    def name(self) -> str:
        """The tenant's name in block keys; it does not tell the API key."""
        if not (self.owner or self.salt):
            return ""
        return hashlib.sha256(json.dumps([self.owner, self.salt]).encode()).hexdigest()


class ApiKeys:
    """The keys that a server knows; without any, everybody is served.

    Args:
        keys: Of users.
        admin_keys: Of those who may also read metrics and flush; without any, every user may.
        names: What logs call a key, by key; one without a name is called by a few digits of its digest.

    Raises:
        ValueError: If a key is empty or could not be sent in a header, or an admin key is given where users have none.
    """

    def __init__(
        self, keys: Sequence[str] = (), admin_keys: Sequence[str] = (), names: Mapping[str, str] | None = None
    ) -> None:
        if any(not key.strip() for key in (*keys, *admin_keys)):
            raise ValueError("an API key is empty; give some characters that nobody guesses")
        if any(key != key.strip() or not (key.isascii() and key.isprintable()) for key in (*keys, *admin_keys)):
            raise ValueError(
                "an API key has spaces around it or characters that are not printable ASCII, so that no header would "
                "match it; give another"
            )
        if admin_keys and not keys:
            raise ValueError("an admin key is given, but no API key, so everybody would be served; give one")
        self._owners = [_owner(key) for key in (*keys, *admin_keys)]
        self._admins = frozenset(_owner(key) for key in admin_keys)
        self._names = {owner: f"key-{owner[:8]}" for owner in self._owners}
        self._names |= {_owner(key): name for key, name in (names or {}).items()}

    @property
    def are_needed(self) -> bool:
        """Whether requests must bring a key."""
        return bool(self._owners)

    @property
    def num_owners(self) -> int:
        """How many there are to share what the server has; everybody is one where no key is needed."""
        return len(set(self._owners)) or 1

    def owner_of(self, authorization: str) -> str | None:
        """Return the digest of the key in an Authorization header; "" if none is needed, None if it is not known.

        The header is "Bearer KEY", or HTTP Basic with the key as password, which browsers ask for.
        """
        if not self._owners:
            return ""
        found = _owner(_key_in(authorization))
        known = [owner for owner in self._owners if hmac.compare_digest(owner, found)]
        return known[0] if known else None

    def name_of(self, owner: str) -> str:
        """Return what logs call a known owner's key; "" where none is needed."""
        return self._names.get(owner, "")

    def may_administrate(self, owner: str) -> bool:
        """Whether a known owner may read metrics and flush the cache."""
        return not self._admins or owner in self._admins


def _owner(key: str) -> str:
    return hashlib.sha256(b"api key\0" + key.encode("utf-8", "surrogatepass")).hexdigest()


def _key_in(authorization: str) -> str:
    scheme, _, rest = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(rest, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return rest.strip() if scheme.lower() == "bearer" else ""
