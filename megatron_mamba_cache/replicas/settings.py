"""Settings of a coordinator: routing, probes, limits and access."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..installation import require_extra
from ..policy.routing import PrefixRouter, RoundRobinRouter
from .coordinator_secrets import read_key_file

if TYPE_CHECKING:
    from .access import Access

_POLICIES = ("prefix", "round-robin")
_COUNTS = ("num_replicas", "num_attempts", "max_message_bytes", "max_request_bytes", "max_pending_bytes")


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """Settings of a coordinator; every value is checked on construction.

    Args:
        policy: "prefix" sends a request to the replica that caches its longest prefix, "round-robin" to the next one.
        load_factor: With "prefix": a replica takes more requests while its work in flight is at most this multiple of
            the mean.
        share_factor: With "prefix": conversations begin on a replica while its recent work is at most this multiple of
            the mean; see `PrefixRouter`.
        max_keys: Boundaries remembered per replica.
        num_replicas: Replicas to wait for before the coordinator is ready; None: those of the launching world. Others
            may join later.
        num_attempts: Replicas that a request may be sent to, one after another as they die; then it fails.
        join_timeout_s: How long the coordinator waits for its first replicas.
        probe_interval_s: Seconds between probes of the connections.
        key_file: File of the secret that all processes share, clients included; see `read_key_file`. With one the
            coordinator listens on the hostname's interface, without one on loopback.
        insecure: Listen on the hostname's interface without a key, and serve anything that reaches the port.
        max_message_bytes: Limit of a message from a replica or between ranks; a connection that announces more is
            closed.
        max_request_bytes: Limit of a client's message; a larger request fails.
        max_pending_bytes: Limit of all unfinished requests, at 8 bytes a token. One client gets a quarter of it; a
            request beyond that fails.

    Raises:
        ValueError: Naming the setting, the value and what is allowed.
    """

    policy: Literal["prefix", "round-robin"] = "prefix"
    load_factor: float = 1.5
    share_factor: float = 1.1
    max_keys: int = 65_536
    num_replicas: int | None = None
    num_attempts: int = 2
    join_timeout_s: float = 600.0
    probe_interval_s: float = 0.5
    key_file: str | os.PathLike[str] | None = None
    insecure: bool = False
    max_message_bytes: int = 64 * 2**20
    max_request_bytes: int = 8 * 2**20
    max_pending_bytes: int = 4 * 2**30

    def __post_init__(self) -> None:
        if self.policy not in _POLICIES:
            raise ValueError(f"policy is {self.policy!r}; it must be one of {_POLICIES}")
        for name in _COUNTS:
            value = getattr(self, name)
            is_absent = name == "num_replicas" and value is None
            if not is_absent and not (type(value) is int and value >= 1):
                raise ValueError(f"{name} is {value!r}; it must be an int of at least 1")
        for name in ("join_timeout_s", "probe_interval_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a positive number of seconds")
        if self.key_file is not None:
            if self.insecure:
                raise ValueError("insecure is True, but there is a key_file; leave one of them out")
            read_key_file(self.key_file)
        self.router()

    def access(self) -> "Access":
        """Return the access rules; needs pyzmq.

        Raises:
            ValueError: If the key file can no longer be read.
            ModuleNotFoundError: If pyzmq is missing, or there is a key file and pyzmq cannot use keys.
        """
        require_extra("server", "a coordinator")
        from .access import InsecureAccess, KeyedAccess, LoopbackAccess

        if self.key_file is not None:
            return KeyedAccess(read_key_file(self.key_file))
        return InsecureAccess() if self.insecure else LoopbackAccess()

    def router(self) -> PrefixRouter:
        """Return a new router of this policy; raise `ValueError` if a factor or `max_keys` is out of range."""
        prefix = PrefixRouter(self.load_factor, self.share_factor, self.max_keys)
        return prefix if self.policy == "prefix" else RoundRobinRouter()
