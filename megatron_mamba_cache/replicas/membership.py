"""Registry of replicas: the processes that each has, and the replicas that have been declared dead."""

from dataclasses import dataclass, field
from typing import Any

from ..policy.routing import ReplicaName
from .prompt_keys import KeySalt
from .wire import Hello, WireError


@dataclass(slots=True)
class Replica:
    """A replica registered with the coordinator; some of its processes may not have joined yet.

    Args:
        members: Socket identity of each process that has joined, keyed by rank; rank 0 receives the requests.
        salt: Salt of the replica's block keys; None until the replica has reported it.
    """

    name: ReplicaName
    num_members: int
    domain: str
    members: dict[int, bytes] = field(default_factory=dict)
    salt: KeySalt | None = None

    @property
    def is_complete(self) -> bool:
        """True if all processes of the replica have joined."""
        return len(self.members) == self.num_members

    @property
    def identity(self) -> bytes:
        """Socket identity of rank 0, which receives the replica's requests."""
        return self.members[0]


_MOST_DEAD = 4096


class Membership:
    """Registry of living and dead replicas, by name and by socket identity.

    A dead replica may not rejoin under the same name. Only the last `_MOST_DEAD` dead replicas are remembered.
    """

    def __init__(self) -> None:
        self._replicas: dict[ReplicaName, Replica] = {}
        self._name_of: dict[bytes, ReplicaName] = {}
        self._dead: dict[ReplicaName, None] = {}
        self._dead_sockets: dict[bytes, None] = {}

    @property
    def serving(self) -> list[Replica]:
        """Living replicas of which all processes have joined."""
        return [replica for replica in self._replicas.values() if replica.is_complete]

    @property
    def identities(self) -> list[bytes]:
        """Socket identities of all living processes."""
        return list(self._name_of)

    @property
    def dead_identities(self) -> list[bytes]:
        """Socket identities of the processes of dead replicas; some may still be connected."""
        return list(self._dead_sockets)

    def __getitem__(self, name: ReplicaName) -> Replica:
        return self._replicas[name]

    def of_socket(self, identity: bytes) -> Replica | None:
        """Return the living replica that a socket belongs to; None if the socket belongs to none."""
        name = self._name_of.get(identity)
        return None if name is None else self._replicas[name]

    def is_dead(self, identity: bytes) -> bool:
        """Return True if a socket belongs to a dead replica."""
        return identity in self._dead_sockets

    def greet(self, identity: bytes, hello: Hello) -> Replica:
        """Register a process and return its replica.

        Raises:
            WireError: If the replica has been declared dead, or the hello contradicts an earlier hello from the
                replica. The process is then not registered.
        """
        if hello.replica in self._dead:
            _remember(self._dead_sockets, identity)
            raise WireError(f"replica {hello.replica} has been declared dead; restart it to get a new name")
        replica = self._replicas.get(hello.replica)
        if replica is None:
            replica = Replica(hello.replica, hello.num_members, hello.domain)
        if (replica.num_members, replica.domain) != (hello.num_members, hello.domain):
            raise WireError(
                f"a process of {hello.replica} reports {hello.num_members} processes and domain {hello.domain!r}, but "
                f"others report {replica.num_members} processes and domain {replica.domain!r}"
            )
        if hello.member in replica.members or identity in self._name_of:
            raise WireError(f"rank {hello.member} of {hello.replica} has already joined")
        self._replicas[hello.replica] = replica
        replica.members[hello.member] = identity
        self._name_of[identity] = hello.replica
        return replica

    def bury(self, identity: bytes) -> list[Replica]:
        """Declare dead the replica of a lost process and all replicas in its domain; return these replicas."""
        lost = self.of_socket(identity)
        if lost is None:
            return []
        buried = [
            replica
            for replica in self._replicas.values()
            if replica is lost or (lost.domain and replica.domain == lost.domain)
        ]
        for replica in buried:
            del self._replicas[replica.name]
            _remember(self._dead, replica.name)
            for member in replica.members.values():
                del self._name_of[member]
                _remember(self._dead_sockets, member)
        return buried


def _remember(dead: dict[Any, None], name: Any) -> None:
    dead[name] = None
    if len(dead) > _MOST_DEAD:
        del dead[next(iter(dead))]
