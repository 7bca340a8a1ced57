"""Routers that choose a replica for each prompt: by cached prefix within a load bound, or round robin."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NewType

from ..errors import CacheCapacityError
from .identifiers import BlockKey
from .replica_keys import ReplicaKeys

ReplicaName = NewType("ReplicaName", str)

_HALF_LIFE = 64
"""Number of later requests per replica after which assigned work counts only half."""


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt's lengths, and its block keys computed with the salt of one replica.

    Args:
        keys: Keys of the prompt's complete blocks; empty if the replica caches nothing.
        block_size: Number of tokens per block.
        prompt_len: Number of tokens in the prompt.
        max_new_tokens: Maximum number of tokens to generate.
    """

    keys: Sequence[BlockKey]
    block_size: int
    prompt_len: int
    max_new_tokens: int = 0

    @property
    def usable(self) -> Sequence[BlockKey]:
        """Keys of the blocks that a hit can cover; at least one prompt token must be computed."""
        return self.keys[: max(self.prompt_len - 1, 0) // self.block_size]

    def work(self, num_cached_blocks: int) -> int:
        """Return the number of tokens to prefill and to generate if `num_cached_blocks` blocks are cached."""
        return self.prompt_len - num_cached_blocks * self.block_size + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Route:
    """Replica chosen for a request, and the number of the request's blocks expected to be cached there."""

    replica: ReplicaName
    num_cached_blocks: int


@dataclass(slots=True)
class _Replica:
    keys: ReplicaKeys
    order: int  # position in the order of joining
    given: float  # assigned work in tokens; older work counts less
    load: int = 0  # work in flight, in tokens


@dataclass(frozen=True, slots=True)
class _InFlight:
    replica: ReplicaName
    work: int
    expected: tuple[BlockKey, ...]


class PrefixRouter:
    """Router that sends each prompt to the replica with its longest cached prefix, within a load bound.

    A replica is a candidate if its work in flight is at most `load_factor` times the mean over replicas plus one mean
    request; the least loaded replica is always a candidate. A conversation stays on its first replica, so only
    candidates with little recent work get a new conversation: at most `share_factor` times the mean plus one mean
    request, if there is such a candidate. Among the remaining candidates, the router prefers, in this order, the
    longest prefix that needs no prefill, the longest prefix whose KV may be cached, the least work in flight, the least
    recent work, and the replica that joined first. Outdated keys can only cause an unnecessary prefill, not a wrong
    token.

    Args:
        max_keys: Maximum number of boundaries, and of prompt blocks, to record for each replica.

    Raises:
        ValueError: If a factor is below 1 or `max_keys` is not positive.
    """

    def __init__(self, load_factor: float = 1.5, share_factor: float = 1.1, max_keys: int = 65_536) -> None:
        for name, factor in (("load_factor", load_factor), ("share_factor", share_factor)):
            if not factor >= 1:
                raise ValueError(f"{name} is {factor}; it must be at least 1")
        if max_keys < 1:
            raise ValueError(f"max_keys is {max_keys}; it must be at least 1")
        self._load_factor = load_factor
        self._share_factor = share_factor
        self._max_keys = max_keys
        self._replicas: dict[ReplicaName, _Replica] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._orders = count()

    @property
    def replicas(self) -> Collection[ReplicaName]:
        """Names of the replicas, in order of joining."""
        return self._replicas.keys()

    def load(self, replica: ReplicaName) -> int:
        """Return the replica's work in flight, in tokens."""
        return self._replicas[replica].load

    def join(self, replica: ReplicaName) -> None:
        """Add a replica with an empty cache; raise `ValueError` if a replica with this name is present."""
        if replica in self._replicas:
            raise ValueError(f"replica {replica} has already joined; give each replica a different name")
        given = sum(other.given for other in self._replicas.values()) / max(len(self._replicas), 1)
        self._replicas[replica] = _Replica(ReplicaKeys(self._max_keys), next(self._orders), given)

    def leave(self, replica: ReplicaName) -> None:
        """Forget a replica and its requests in flight; do nothing if the replica is unknown."""
        self._replicas.pop(replica, None)
        left = [request_id for request_id, entry in self._in_flight.items() if entry.replica == replica]
        for request_id in left:
            del self._in_flight[request_id]

    def publish(self, replica: ReplicaName, keys: Iterable[BlockKey]) -> None:
        """Record boundaries that a replica can resume from; ignore an unknown replica."""
        if replica in self._replicas:
            self._replicas[replica].keys.resumable.note(keys)

    def drop(self, replica: ReplicaName, keys: Iterable[BlockKey]) -> None:
        """Remove boundaries that a replica can no longer resume from."""
        if replica in self._replicas:
            self._replicas[replica].keys.resumable.discard(keys)

    def flush(self, replica: ReplicaName) -> None:
        """Record that a replica's cache is empty."""
        if replica in self._replicas:
            self._replicas[replica].keys.flush()

    def route(self, request_id: int, blocks_on: Callable[[ReplicaName], PromptBlocks]) -> Route:
        """Choose a replica for a request, and add the request to the replica's load until `finish`.

        Args:
            request_id: Unique among requests in flight.
            blocks_on: Function that returns the prompt with its block keys for a given replica.

        Raises:
            CacheCapacityError: If there is no replica.
            ValueError: If the request is already in flight.
        """
        if request_id in self._in_flight:
            raise ValueError(f"request {request_id} is in flight; finish it before it is routed again")
        candidates = self._within_bound()
        if not candidates:
            raise CacheCapacityError("no replica is running; start one")
        route = self._best(candidates, blocks_on)
        self._count(request_id, route, blocks_on(route.replica))
        return route

    def finish(self, request_id: int) -> None:
        """Subtract a request from the load of its replica; do nothing if the request is unknown."""
        entry = self._in_flight.pop(request_id, None)
        if entry is not None:
            replica = self._replicas[entry.replica]
            replica.load -= entry.work
            replica.keys.stop_expecting(entry.expected)

    def _within_bound(self) -> list[ReplicaName]:
        """Return the replicas within the load bound."""
        return self._below({name: replica.load for name, replica in self._replicas.items()}, self._load_factor)

    def _below(self, amounts: Mapping[ReplicaName, float], factor: float) -> list[ReplicaName]:
        slack = sum(replica.load for replica in self._replicas.values()) / max(len(self._in_flight), 1)
        bound = factor * sum(amounts.values()) / max(len(amounts), 1) + slack
        return [name for name, amount in amounts.items() if amount <= bound]

    def _best(self, candidates: Sequence[ReplicaName], blocks_on: Callable[[ReplicaName], PromptBlocks]) -> Route:
        depths = {name: self._replicas[name].keys.resumable_depth(blocks_on(name).usable) for name in candidates}
        modest = self._below({name: replica.given for name, replica in self._replicas.items()}, self._share_factor)
        eligible = [name for name in candidates if name in modest or self._continues(name, depths[name], blocks_on)]
        ranked = []
        for name in eligible or candidates:
            replica = self._replicas[name]
            seen = replica.keys.seen_depth(blocks_on(name).usable)
            ranked.append(((-depths[name], -seen, replica.load, replica.given, replica.order), name))
        name = min(ranked)[1]
        return Route(name, depths[name])

    def _continues(self, name: ReplicaName, depth: int, blocks_on: Callable[[ReplicaName], PromptBlocks]) -> bool:
        """Return whether a prompt resumes at the newest boundary of a conversation."""
        return depth > 0 and blocks_on(name).keys[depth - 1] not in self._replicas[name].keys.resumed

    def _count(self, request_id: int, route: Route, blocks: PromptBlocks) -> None:
        replica, keys = self._replicas[route.replica], blocks.keys
        # Prefill caches states at the prompt's last boundary, at the last boundary that a repeat of the prompt can
        # use, and at the end of its KV match.
        match_end = replica.keys.seen_depth(keys)
        ends = {len(keys), len(blocks.usable), match_end} - {0}
        entry = _InFlight(route.replica, blocks.work(route.num_cached_blocks), tuple(keys[end - 1] for end in ends))
        for other in self._replicas.values():
            other.given *= 0.5 ** (1 / (_HALF_LIFE * len(self._replicas)))
        replica.load += entry.work
        replica.given += entry.work
        replica.keys.seen.note(keys)
        replica.keys.resumed.note(keys[route.num_cached_blocks - 1 : route.num_cached_blocks])
        replica.keys.expect(entry.expected)
        self._in_flight[request_id] = entry


class RoundRobinRouter(PrefixRouter):
    """Router that sends prompts to replicas round robin, as a baseline."""

    def __init__(self) -> None:
        super().__init__(max_keys=1)
        self._turn = 0

    def publish(self, replica: ReplicaName, keys: Iterable[BlockKey]) -> None:
        """Do nothing, because cached prefixes are ignored."""

    def route(self, request_id: int, blocks_on: Callable[[ReplicaName], PromptBlocks]) -> Route:
        """Choose the next replica in order of joining; the prompt's blocks are ignored."""
        return super().route(request_id, lambda name: replace(blocks_on(name), keys=()))

    def _within_bound(self) -> list[ReplicaName]:
        names = list(self._replicas)
        if not names:
            return []
        self._turn += 1
        return [names[(self._turn - 1) % len(names)]]
