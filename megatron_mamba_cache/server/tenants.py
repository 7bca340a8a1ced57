"""API keys and tenants. Different tenants never share cached prefixes."""

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """An API key and a salt; requests with the same pair share cached prefixes."""

    owner: str = ""  # digest of the API key; "" if the server has no keys
    salt: str = ""  # the request's `cache_salt`

    @property
    def name(self) -> str:
        """Name of the tenant in block keys; does not reveal the API key."""
        if not (self.owner or self.salt):
            return ""
        return hashlib.sha256(json.dumps([self.owner, self.salt]).encode()).hexdigest()


class ApiKeys:
    """API keys that a server accepts; a server without keys accepts every request.

    Args:
        admin_keys: Keys that may also read metrics and flush; if there are none, every key may.
        names: Names of keys in logs; for other keys, logs show the first eight digits of the digest.

    Raises:
        ValueError: If a key is empty or cannot be sent in a header, or if there are admin keys but no other keys.
    """

    def __init__(
        self, keys: Sequence[str] = (), admin_keys: Sequence[str] = (), names: Mapping[str, str] | None = None
    ) -> None:
        if any(not key.strip() for key in (*keys, *admin_keys)):
            raise ValueError("an API key is empty; choose a key that cannot be guessed")
        if any(key != key.strip() or not (key.isascii() and key.isprintable()) for key in (*keys, *admin_keys)):
            raise ValueError(
                "an API key begins or ends with a space or has characters that are not printable ASCII, so no header "
                "can match it; choose another key"
            )
        if admin_keys and not keys:
            raise ValueError(
                "an admin key is set but no API key, so requests without a key would be served; set an API key"
            )
        self._owners = [_owner(key) for key in (*keys, *admin_keys)]
        self._admins = frozenset(_owner(key) for key in admin_keys)
        self._names = {owner: f"key-{owner[:8]}" for owner in self._owners}
        self._names |= {_owner(key): name for key, name in (names or {}).items()}

    @property
    def are_needed(self) -> bool:
        """True if requests must have an API key."""
        return bool(self._owners)

    @property
    def num_owners(self) -> int:
        """Number of owners that share the server's memory; 1 if no key is needed."""
        return len(set(self._owners)) or 1

    def owner_of(self, authorization: str) -> str | None:
        """Return the digest of the key in an Authorization header; "" if no key is needed, None if the key is unknown.

        The header is "Bearer KEY", or HTTP Basic with the key as password (from a browser's login dialog).
        """
        if not self._owners:
            return ""
        found = _owner(_key_in(authorization))
        known = [owner for owner in self._owners if hmac.compare_digest(owner, found)]
        return known[0] if known else None

    def name_of(self, owner: str) -> str:
        """Return the name of an owner's key in logs; "" if no key is needed."""
        return self._names.get(owner, "")

    def may_administrate(self, owner: str) -> bool:
        """Return True if an owner may read metrics and flush the cache."""
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
