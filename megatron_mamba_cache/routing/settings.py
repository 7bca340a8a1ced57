"""How requests are spread over replicas, and when a replica counts as dead."""

from dataclasses import dataclass
from typing import Literal

from ..policy.routing import PrefixRouter, RoundRobinRouter

_POLICIES = ("prefix", "round-robin")


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """Settings of a coordinator; every value is checked on construction.

    Args:
        policy: "prefix" sends a request where the longest prefix of it is cached, "round-robin" to the next in turn.
        load_factor: With "prefix": work in flight, over the mean, up to which a replica takes more.
        share_factor: With "prefix": work given out lately, over the mean, up to which conversations begin there; see
            `PrefixRouter`.
        max_keys: Boundaries remembered of each replica.
        num_replicas: Replicas to wait for before the coordinator is ready; None: those of the launching world. Others
            may join later.
        num_attempts: Replicas that a request may be sent to, one after another as they die; then it fails.
        join_timeout_s: How long the coordinator waits for its first replicas.
        probe_interval_s: How often it looks whether replicas are there.

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

    def __post_init__(self) -> None:
        if self.policy not in _POLICIES:
            raise ValueError(f"policy is {self.policy!r}; it must be one of {_POLICIES}")
        for name in ("num_replicas", "num_attempts"):
            value = getattr(self, name)
            is_absent = name == "num_replicas" and value is None
            if not is_absent and not (type(value) is int and value >= 1):
                raise ValueError(f"{name} is {value!r}; it must be an int of at least 1")
        for name in ("join_timeout_s", "probe_interval_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a positive number of seconds")
        self.router()

    def router(self) -> PrefixRouter:
        """Return a new router of this policy.

        Raises:
            ValueError: If a factor or `max_keys` is out of range.
        """
        prefix = PrefixRouter(self.load_factor, self.share_factor, self.max_keys)
        return prefix if self.policy == "prefix" else RoundRobinRouter()
