"""Engine that can serve requests from a coordinator, as one of its replicas."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.inference.headers import Headers
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.utils import await_process_call
from typing_extensions import override

from ..errors import CacheIntegrityError
from ..installation import require_extra
from ..mcore.context import MambaCacheContext
from ..mcore.controller import MambaCacheController
from ..mcore.engine import MambaCacheEngine
from ..mcore.request_states import ROUTED_EXPERTS, encoded_routes
from .cache_reports import CacheReports, NoReports
from .expert_peers import Standing, all_step
from .identity import ReplicaIdentity, address_on_this_host, agree_on_identity, check_ranks, starts_coordinator
from .settings import RoutingSettings

if TYPE_CHECKING:
    from .channels import Channel
    from .progress_reports import ProgressReports

logger = logging.getLogger(__name__)

MOST_FAILED_STEPS = 16
"""Number of consecutive failed steps after which a replica stops; its requests then go to other replicas."""


class ReplicaEngine(MambaCacheEngine):
    """Engine that serves requests from a coordinator and reports its cached prefixes to the coordinator.

    Without a coordinator, it works like `MambaCacheEngine`. Values for which Megatron's protocol has no field are sent
    as additional sampling parameters. A client may add fields of `RequestSpec`, as in
    `sampling.add_attributes({"spec": {"tenant": "red"}})`. The sampling parameters of a reply contain `cached_tokens`,
    `cached_tokens_from_host`, `cached_tokens_from_disk`, `replica` and, if recorded, `routed_experts`.
    """

    socket_for_receiving_requests: Any

    def __init__(self, controller: MambaCacheController, context: MambaCacheContext, random_seed: int = 0) -> None:
        self._reports: CacheReports | NoReports = NoReports()
        self._progress: ProgressReports | NoReports = NoReports()
        self._replica_name = ""
        self._zmq_context: Any = None  # created with the first sockets
        self._failed_in_a_row = 0
        self._leave_coordinator: Callable[[], None] = lambda: None
        super().__init__(controller, context, random_seed)

    @override
    async def start_listening_to_data_parallel_coordinator(
        self,
        inference_coordinator_port: int | None = None,
        launch_inference_coordinator: bool = True,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        coordinator_address: str | None = None,
        routing: RoutingSettings | None = None,
    ) -> str:
        """Join a coordinator and return its address; all ranks of the launch must call this method.

        Args:
            inference_coordinator_port: Preferred port for a new coordinator, or the port of a running coordinator.
            launch_inference_coordinator: True to start a coordinator on the first rank.
            coordinator_address: Address of a running coordinator from another launch, such as "tcp://host:5555"; no
                coordinator is started then.
            routing: Settings for a new coordinator; its key and message limits also apply to the replicas.

        Raises:
            MissingExtraError: If pyzmq or msgpack is missing.
            ValueError: If the ranks and the coordinator are not all on one host, but `routing` has neither a key file
                nor `insecure`.
            ConnectionError: If no coordinator answers at the address.
        """
        require_extra("server", "a coordinator")
        from .launch import launch_coordinator

        routing = routing or RoutingSettings()
        groups, access = self.pg_collection, routing.access()
        check_ranks(groups, access)
        launches = launch_inference_coordinator and coordinator_address is None
        launched = None
        if launches and starts_coordinator(groups):
            launched = await asyncio.to_thread(
                launch_coordinator, self.controller.tokenizer, inference_coordinator_port, routing, groups.dp.size()
            )
            self.inference_coordinator_process = launched.process  # Megatron's `stop` waits for it
            self._leave_coordinator = launched.leave
            coordinator_address = launched.address
        elif not launches and coordinator_address is None:
            coordinator_address = address_on_this_host(inference_coordinator_port, access.host)
        try:
            identity = agree_on_identity(groups, coordinator_address)
            await self._take_part(identity, routing, loop)
        except BaseException:
            self._leave_coordinator()
            raise
        if launched is not None:
            await await_process_call(launched.ready.wait, launched.process)
        return identity.address

    @property
    def zmq_context(self) -> Any:
        """ZMQ context for the sockets between ranks."""
        return self._zmq_context

    @zmq_context.setter
    def zmq_context(self, found: Any) -> None:
        """Ignore the context that Megatron sets, because its sockets are unprotected; keep the existing one."""
        self._zmq_context = self._zmq_context or found

    async def _take_part(
        self, identity: ReplicaIdentity, routing: RoutingSettings, loop: asyncio.AbstractEventLoop | None
    ) -> None:
        """Open the sockets between ranks and join the coordinator."""
        from .access import port_of
        from .rank_sockets import RankContext

        access = routing.access()
        access.check_address(identity.address)
        port = port_of(identity.address)
        joining = access.joining(port)
        self._zmq_context = RankContext(access.host, joining.channel, routing.max_message_bytes)
        await super().start_listening_to_data_parallel_coordinator(port, False, loop=loop)
        self._zmq_context.wait_for_ranks(identity.num_members, self.ep_world_size, routing.join_timeout_s)
        await self._join(identity, joining.proof, access.channel, routing)

    async def _join(self, identity: ReplicaIdentity, proof: str, channel: "Channel", routing: RoutingSettings) -> None:
        """Replace Megatron's socket with a `ReplicaLink` and wait until the coordinator has accepted this process."""
        from .progress_reports import ProgressReports
        from .replica_link import ReplicaLink
        from .wire import Hello

        self._replica_name = identity.replica
        hello = Hello(identity.replica, identity.member, identity.num_members, identity.domain, proof)
        self._link = ReplicaLink(self.zmq_context, identity.address, hello, routing.max_message_bytes, channel)
        self.zmq_sockets.append(self._link)
        if self.is_mp_coordinator:
            # Megatron's socket is named by data-parallel rank, which is not unique across launches.
            self.zmq_sockets.remove(self.socket_for_receiving_requests)
            self.socket_for_receiving_requests.close(linger=0)
            self.socket_for_receiving_requests = self._link
            self._reports = CacheReports(self.context, self._link)
            self._progress = ProgressReports(self, self._link)
        self._watch_peers()
        await self._link.wait_for_welcome(routing.join_timeout_s)

    def _watch_peers(self) -> None:
        """Replace the sockets that read from other ranks, so that reads raise if the replica is declared dead."""
        from .rank_sockets import PeerSocket

        for name in ("model_parallel_subscriber_socket", "model_parallel_num_msgs_subscriber_socket"):
            socket = getattr(self, name)
            self.zmq_sockets.remove(socket)
            setattr(self, name, PeerSocket(socket, self._link))
            self.zmq_sockets.append(getattr(self, name))
        if self.ep_world_size > 1:
            experts = self.expert_parallel_zmq_communicator
            heard = "gather_sock" if experts.is_leader else "bcast_sock"
            setattr(experts, heard, PeerSocket(getattr(experts, heard), self._link))

    @override
    def add_request(
        self,
        request_id: int,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        tenant: str = "",
    ) -> asyncio.Future[Any]:
        """Add a request; see `MambaCacheEngine`.

        With a coordinator, an invalid request ends as failed instead of raising, so other requests are unaffected. The
        coordinator also sends cancels, aborts and flushes as requests; see `replicas.front_end`.
        """
        if self.use_coordinator:
            from .progress_reports import obeyed

            if obeyed(self, request_id, sampling_params, self._reply):
                unanswered: asyncio.Future[Any] = self._loop.create_future()
                return unanswered
        try:
            return super().add_request(request_id, prompt, sampling_params, seed=seed, tenant=tenant)
        except Exception as error:
            if not self.use_coordinator or request_id in self.requests:
                raise
            no_tokens = torch.empty(0, dtype=torch.int64)
            text = prompt if isinstance(prompt, str) else None
            request = DynamicInferenceRequest(
                request_id=request_id, prompt=text, prompt_tokens=no_tokens, sampling_params=sampling_params
            )
            return self._refuse(request, str(error))

    @override
    def schedule_requests(self) -> int:
        """Read the coordinator's messages and return their number; report cached prefixes and engine state to it."""
        num_messages: int = super().schedule_requests()
        if not self.is_mp_coordinator:
            self._link.drain()
        self.land_idle_copies()  # called here because all ranks reach this point between the same steps
        if self.is_suspended and not self.suspend_signal:
            self.resume()  # resume first, because the loop cannot run work on a suspended engine
        self._reports.send()
        self._progress.send_state()
        return num_messages

    @override
    async def async_step(self) -> Any:
        """Run one step; with a coordinator, a failed step is logged and its requests are retried."""
        try:
            outcome = await super().async_step()
        except CacheIntegrityError:
            raise  # the cache may be corrupt
        except Exception:
            self._failed_in_a_row += 1
            # A rank that steps together with other ranks cannot decide alone to retry.
            is_one_process = self.use_coordinator and self.pg_collection.mp.size() == 1 and self.ep_world_size == 1
            if not is_one_process or self._failed_in_a_row >= MOST_FAILED_STEPS:
                raise
            logger.exception("a step of replica %s failed; its requests are retried", self._replica_name)
            return None
        self._failed_in_a_row = 0
        return outcome

    @override
    async def async_bookkeep(self, step_result: Any, *args: Any, **settings: Any) -> Any:
        """Report the results of a step; see `MambaCacheEngine`."""
        report = await super().async_bookkeep(step_result, *args, **settings)
        self._progress.send(report["active_request_ids"])
        return report

    def _before_report(self, step_result: Any) -> None:
        """Report cached prefixes before the replies, so that the coordinator can use them for follow-up requests."""
        if self.use_coordinator:
            finished = [] if step_result is None else step_result["finished_request_ids"].tolist()
            for request_id in [*finished, *self.failed_request_ids]:
                self._annotate(self.requests[request_id].record, request_id)
            self._reports.send()
            self._send_unreported()

    @override
    def suspend(self) -> None:
        """Drop the states of running requests; free the device memory unless `resident_pools` is set."""
        had_memory = self.context.is_tensor_state_allocated
        super().suspend()
        if had_memory and not self.context.is_tensor_state_allocated:
            self._reports.note_freed()

    @override
    def resume(self, weights_version: str | None = None) -> None:
        """Allocate the memory again if it was freed, and continue with the model's current weights."""
        had_memory = self.context.is_tensor_state_allocated
        super().resume(weights_version)
        if not had_memory:
            self._reports.watch()

    @override
    async def run_engine_with_coordinator(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Run steps until the coordinator stops the engine or an error ends it; then leave the coordinator."""
        try:
            await super().run_engine_with_coordinator(loop=loop)
        finally:
            self._link.close()
            self._leave_coordinator()

    @override
    async def _ep_group_has_work(self, local_work: int) -> bool:
        """Return True if the expert-parallel group runs a step now; called by Megatron's loop.

        On a rank without work, first report the requests that have failed.
        """
        if not local_work and (self.failed_request_ids or self._unreported):
            await self.async_bookkeep(None, {"kv_stats": None}, 0.0, self.step_count)
        found = self.owes_step or await all_step(self._standing(local_work), self._highest_standing)
        if self.context.is_tensor_state_allocated:
            runner = self.context.runner
            if not found:
                runner.sharing.forget()  # the agreed step shape is obsolete, as ranks may suspend before the next step
            elif not local_work:
                runner.queue.note_waiting(has_waiting=False)
                runner.queue.note_scheduled(is_settled=self._is_at_rest())
        return found

    def _standing(self, local_work: int) -> Standing:
        if self.stopped.is_set():
            return Standing.STOPPED
        if self.is_suspended:
            return Standing.SUSPENDED
        return Standing.WORKING if local_work and not self._is_pausing() else Standing.RESTING

    def _is_pausing(self) -> bool:
        return bool(self.received_stop or self.paused.is_set() or self.received_pause or self.suspend_signal)

    def _is_at_rest(self) -> bool:
        return super()._is_at_rest() and not self._is_pausing()

    async def _highest_standing(self, mine: Standing) -> int:
        if self.ep_world_size == 1:
            return mine
        highest: int = await self.expert_parallel_zmq_communicator.all_reduce_max(mine)
        return highest

    def _send_unreported(self) -> None:
        """Send the replies of requests that ended in a step which then raised an error."""
        self._reply(self._unreported)

    def _reply(self, records: Sequence[Any]) -> None:
        """Send the records of requests that have ended outside of a step's report."""
        if records and self.is_mp_coordinator:
            import msgpack

            for record in records:
                self._annotate(record, record.request_id)
            packed = [record.serialize() for record in records]
            self._link.send(msgpack.packb([Headers.ENGINE_REPLY.value, packed]))

    def _annotate(self, record: Any, request_id: int) -> None:
        counts = self.counts_of(request_id).as_mapping()
        routes = {} if record.routes is None else {ROUTED_EXPERTS: encoded_routes(record.routes)}
        versions = {"weights_versions": self.weights_versions(request_id)}
        for name, value in {**counts, **routes, **versions, "replica": self._replica_name}.items():
            setattr(record[0].sampling_params, name, value)
