"""Settings for a coordinator: routing, probes, limits and access."""

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
    """Settings for a coordinator; every value is checked on construction.

    Args:
        policy: "prefix" sends a request to the replica with its longest cached prefix, "round-robin" to the next
            replica.
        load_factor: For "prefix": a replica gets more requests as long as its work in flight is at most this multiple
            of the mean.
        share_factor: For "prefix": a replica gets new conversations as long as its recent work is at most this multiple
            of the mean; see `PrefixRouter`.
        max_keys: Maximum number of boundaries remembered per replica.
        num_replicas: Number of replicas to wait for before the coordinator is ready; None: all replicas of the launch.
            More replicas may join later.
        num_attempts: Maximum number of replicas to which a request is sent, each after the previous replica died.
        join_timeout_s: Seconds that the coordinator waits for `num_replicas` replicas.
        probe_interval_s: Seconds between probes of the connections.
        key_file: File with the secret that all processes share, including clients; see `read_key_file`. With a key
            file, the coordinator listens on the hostname's interface, otherwise on loopback.
        insecure: True to listen on the hostname's interface without a key; any process that reaches the port is served.
        max_message_bytes: Maximum size of a message from a replica or between ranks; a connection that announces a
            larger message is closed.
        max_request_bytes: Maximum size of a message from a client; a larger request fails.
        max_pending_bytes: Maximum size of all unfinished requests, at 8 bytes per token. One client may use a quarter
            of it; a request that exceeds a limit fails.

    Raises:
        ValueError: Naming the setting, the value and the allowed values.
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
                raise ValueError("insecure is True, but key_file is also set; leave one of them out")
            read_key_file(self.key_file)
        self.router()

    def access(self) -> "Access":
        """Return the access rules for these settings; needs pyzmq.

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
        """Return a new router for this policy; raise `ValueError` if a factor or `max_keys` is out of range."""
        prefix = PrefixRouter(self.load_factor, self.share_factor, self.max_keys)
        return prefix if self.policy == "prefix" else RoundRobinRouter()
