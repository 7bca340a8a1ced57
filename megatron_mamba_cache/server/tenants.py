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
    """Cache tenant: an API key and a `cache_salt`; requests share cached prefixes only if both are equal."""

    owner: str = ""  # digest of the API key; "" if no key is needed
    salt: str = ""  # the request's `cache_salt`

    @property
    def name(self) -> str:
        """Hash that identifies the tenant in the keys of cached blocks; "" for the default tenant."""
        if not (self.owner or self.salt):
            return ""
        return hashlib.sha256(json.dumps([self.owner, self.salt]).encode()).hexdigest()


class ApiKeys:
    """API keys that a server accepts; without keys, it accepts every request.

    Args:
        admin_keys: Keys that may also use admin paths; if empty, all keys may.
        names: Names for logs, by key. A key without a name is logged as "key-" and eight digits of its digest.

    Raises:
        ValueError: If a key is empty or not valid in a header, or if `admin_keys` is set without `keys`.
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
        """Number of distinct API keys, which share the server's memory limits; 1 if no key is needed."""
        return len(set(self._owners)) or 1

    def owner_of(self, authorization: str) -> str | None:
        """Return the digest of the key in an Authorization header; "" if no key is needed, None for an unknown key.

        The header is "Bearer KEY", or HTTP Basic authentication with the key as the password, which browsers send.
        """
        if not self._owners:
            return ""
        found = _owner(_key_in(authorization))
        known = [owner for owner in self._owners if hmac.compare_digest(owner, found)]
        return known[0] if known else None

    def name_of(self, owner: str) -> str:
        """Return the log name for an owner's key; "" if no key is needed."""
        return self._names.get(owner, "")

    def may_administrate(self, owner: str) -> bool:
        """Return True if an owner may use the admin paths, such as metrics and cache flush."""
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
