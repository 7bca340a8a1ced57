"""Assign each process of a launch to a replica, and share the coordinator's address among them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch.distributed as dist
from megatron.core.utils import get_pg_rank, get_pg_size, get_pg_src_rank

from ..policy.routing import ReplicaName
from .coordinator_secrets import host_identity

if TYPE_CHECKING:
    from .access import Access


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Identity of a process: its replica, its rank in that replica, and the coordinator's address.

    Args:
        replica: Name of the replica, unique across all launches.
        member, num_members: Rank in the replica's model-parallel group, and number of ranks in that group.
        domain: Name shared by the replicas of one expert-parallel group; "" without expert parallelism.
    """

    replica: ReplicaName
    member: int
    num_members: int
    domain: str
    address: str


def starts_coordinator(groups: Any) -> bool:
    """Return True if this process is the one that starts the coordinator of its launch."""
    return _is_first_member(groups) and get_pg_rank(groups.dp) == 0


def address_on_this_host(port: int | None, host: str) -> str:
    """Return the address of a coordinator that is running on this host.

    Args:
        host: Name of the interface to which the coordinator is bound.

    Raises:
        ValueError: If no port is given.
    """
    if port is None:
        raise ValueError(
            "no coordinator is given; set coordinator_address, or inference_coordinator_port for one on this host"
        )
    return f"tcp://{host}:{port}"


def check_ranks(groups: Any, access: "Access") -> None:
    """Check that the processes of a launch can reach each other and have the same access rules.

    Raises:
        ValueError: If not; raised on all processes.
    """
    ranks = {(host_identity(), access.fingerprint)}
    for group in (groups.mp, groups.dp):
        ranks = set().union(*_gathered(ranks, group))
    if len({fingerprint for _, fingerprint in ranks}) > 1:
        raise ValueError("the access rules differ between ranks; give all ranks the same key file, or none")
    access.check_hosts([host for host, _ in ranks])


def _gathered(found: set[Any], group: Any) -> list[set[Any]]:
    everywhere: list[set[Any]] = [found] * get_pg_size(group)
    if len(everywhere) > 1:
        dist.all_gather_object(everywhere, found, group=group)
    return everywhere


def agree_on_identity(groups: Any, address: str | None) -> ReplicaIdentity:
    """Name the replicas and share the coordinator's address; all processes of the launch must call this function.

    Args:
        address: Coordinator's address. If a process of this launch started the coordinator, only that process gives
            the address, and the others pass None. Otherwise, all processes give it.
    """
    shared: list[Any] = [address, uuid4().hex]  # overwritten by the broadcast
    dist.broadcast_object_list(shared, src=get_pg_src_rank(groups.dp), group=groups.dp)
    if _is_first_member(groups):
        address, launch = shared
        domain = f"{launch}-{get_pg_src_rank(groups.ep)}" if get_pg_size(groups.ep) > 1 else ""
        shared = [address, f"replica-{get_pg_rank(groups.dp)}-{uuid4().hex[:12]}", domain]
    else:
        shared = [None, None, None]
    dist.broadcast_object_list(shared, src=get_pg_src_rank(groups.mp), group=groups.mp)
    address, replica, domain = shared
    return ReplicaIdentity(replica, get_pg_rank(groups.mp), get_pg_size(groups.mp), domain, address)


def _is_first_member(groups: Any) -> bool:
    is_first: bool = get_pg_rank(groups.tp) == 0 and get_pg_rank(groups.pp) == 0
    return is_first
