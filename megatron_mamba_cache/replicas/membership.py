"""Keep track of the processes of each replica, and of dead replicas."""

from dataclasses import dataclass, field
from typing import Any

from ..policy.routing import ReplicaName
from .prompt_keys import KeySalt
from .wire import Hello, WireError


@dataclass(slots=True)
class Replica:
    """Replica, of which some processes may not have joined yet.

    Args:
        members: Socket identities by rank in the replica; rank 0 receives the requests.
        salt: Salt for the replica's block keys; None before it is reported.
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
        """Identity of the socket that receives the requests."""
        return self.members[0]


_MOST_DEAD = 4096


class Membership:
    """Replicas by name and by socket; a dead replica may not rejoin.

    Only the newest `_MOST_DEAD` dead replicas are remembered.
    """

    def __init__(self) -> None:
        self._replicas: dict[ReplicaName, Replica] = {}
        self._name_of: dict[bytes, ReplicaName] = {}
        self._dead: dict[ReplicaName, None] = {}
        self._dead_sockets: dict[bytes, None] = {}

    @property
    def serving(self) -> list[Replica]:
        """Replicas whose processes have all joined."""
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
        """Return the living replica that a socket belongs to."""
        name = self._name_of.get(identity)
        return None if name is None else self._replicas[name]

    def is_dead(self, identity: bytes) -> bool:
        """Return whether a socket belongs to a dead replica."""
        return identity in self._dead_sockets

    def greet(self, identity: bytes, hello: Hello) -> Replica:
        """Register a process and return its replica.

        Raises:
            WireError: If the hello contradicts an earlier hello from the replica; nothing has changed then.
        """
        if hello.replica in self._dead:
            _remember(self._dead_sockets, identity)
            raise WireError(f"replica {hello.replica} has been declared dead; restart it to get a new name")
        replica = self._replicas.get(hello.replica)
        if replica is None:
            replica = Replica(hello.replica, hello.num_members, hello.domain)
        if (replica.num_members, replica.domain) != (hello.num_members, hello.domain):
            raise WireError(
                f"a member of {hello.replica} reports {hello.num_members} members; others report another number "
                "or domain"
            )
        if hello.member in replica.members or identity in self._name_of:
            raise WireError(f"member {hello.member} of {hello.replica} has already joined")
        self._replicas[hello.replica] = replica
        replica.members[hello.member] = identity
        self._name_of[identity] = hello.replica
        return replica

    def bury(self, identity: bytes) -> list[Replica]:
        """Remove the replica of a lost process and all replicas in its domain; return them."""
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
