"""Megatron's coordinator with prefix-aware routing and recovery from dead replicas.

A replica counts as alive as long as its connection is open. ZMQ answers heartbeats in an I/O thread, so a long step is
not mistaken for a failure. If a process exits, its connection closes; if its host stops responding, heartbeats time out
and the connection is closed. The coordinator's next send to that process then fails, which marks the replica as dead.
"""

import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import zmq
from megatron.core.inference.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron.core.inference.headers import Headers
from typing_extensions import override

from ..policy.routing import PromptBlocks, ReplicaName
from .control_signals import ANSWERS, SIGNALS, ControlSignals
from .front_end import pack_cancel
from .mailbox import Mailbox
from .membership import Membership, Replica
from .prompt_keys import PromptKeys, prompt_tokens
from .requests_in_flight import PendingLimitError, RequestInFlight, RequestsInFlight, failed_record, readable_sampling
from .settings import RoutingSettings
from .wire import FENCED, HELLO, KEYS, PROBE, UNSENT, WELCOME, WireError, hello_of, opening_of, report_of, unsent_of

logger = logging.getLogger(__name__)

_CONNECTED = msgpack.packb([Headers.CONNECT_ACK.value])
"""Answer to a client's CONNECT; Megatron's client ignores a repeated answer."""


class PrefixCoordinator(DataParallelInferenceCoordinator):
    """Coordinator that routes requests from Megatron's `InferenceClient`s to replicas, which may join and leave.

    If a replica dies, its requests are sent to another replica, or fail after `RoutingSettings.num_attempts`.
    The sender of a request or a signal counts as a client even if it has not sent CONNECT, because ZMQ reconnects a
    client under another identity without notifying it. Malformed messages, and replies, answers to signals or key
    reports from senders that are not replicas, are logged and ignored.

    Args:
        pipe_connection: Connection to which the coordinator's address is sent.
        tokenizer: Object with `tokenize`, `detokenize` and `bos`.
        inference_coordinator_port: Preferred port; another free port is used if it is taken. None: any free port.
        num_replicas: Number of replicas for which `wait_for_replicas` waits.
        starter_has_left: Returns True once the process that started this coordinator no longer needs it.
            The coordinator also assumes this if its parent process ends.
    """

    def __init__(
        self,
        pipe_connection: Connection,
        tokenizer: Any,
        inference_coordinator_port: int | None,
        settings: RoutingSettings,
        num_replicas: int = 1,
        starter_has_left: Callable[[], bool] = lambda: False,
    ) -> None:
        # Megatron's constructor is not called: it would bind before socket options are set, and wait forever.
        self._settings = settings
        self._num_replicas = settings.num_replicas or num_replicas
        self._parent = os.getppid()
        self._starter_has_left = starter_has_left
        self._next_probe = 0.0
        self._mailbox = Mailbox(inference_coordinator_port, settings.access(), settings.max_message_bytes)
        self.addr = self._mailbox.address
        self._router = settings.router()
        self._members = Membership()
        self._signals = ControlSignals()
        self._clients: set[bytes] = set()
        self._in_flight = RequestsInFlight(settings.max_pending_bytes)
        self.tokenizer = tokenizer
        self.next_request_id = 0
        pipe_connection.send(self.addr)
        pipe_connection.close()

    def wait_for_replicas(self) -> None:
        """Serve until all expected replicas have joined; raise `TimeoutError` after `join_timeout_s`."""
        end = time.monotonic() + self._settings.join_timeout_s
        while len(self._members.serving) < self._num_replicas and not self._is_abandoned():
            self._serve_round()
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{len(self._members.serving)} of {self._num_replicas} replicas joined {self.addr} in "
                    f"{self._settings.join_timeout_s:g} s; see the logs of the other replicas"
                )

    @override
    def start(self) -> None:
        """Serve until the engines are stopped, or the starting process, all replicas and all clients have left."""
        while not self._signals.is_over and not self._is_abandoned():
            self._serve_round()

    @override
    def stop(self) -> None:
        self._mailbox.close()

    def _is_abandoned(self) -> bool:
        is_used = self._members.identities or self._clients
        return not is_used and (os.getppid() != self._parent or self._starter_has_left())

    def _serve_round(self) -> None:
        """Wait for messages until the next probe is due, handle them, and send due probes and control signals."""
        for frames in self._mailbox.receive(max(self._next_probe - time.monotonic(), 0.0)):
            self._handle_frames(frames)
        if time.monotonic() >= self._next_probe:
            self._probe()
            self._mailbox.summarize()
            self._next_probe = time.monotonic() + self._settings.probe_interval_s
        self._announce()

    @override
    def detokenize(self, finished_request_record: Any) -> None:
        """Add the generated text to a record, in place.

        If the reply was interrupted and has several parts, the first part gets the whole text.
        """
        super().detokenize(finished_request_record)
        first, *others = finished_request_record["requests"]
        if others:
            tokens = [token for part in (first, *others) for token in part["generated_tokens"]]
            first["generated_text"] = self.tokenizer.detokenize(tokens)
            for part in others:
                part["generated_text"] = ""

    def _probe(self) -> None:
        """Send a message to every connection to detect closed connections.

        Clients get a repeated answer to CONNECT, which they ignore.
        """
        self._send_all(self._members.identities, PROBE)
        self._send_all(self._members.dead_identities, FENCED)  # notifies idle processes of dead replicas
        self._send_all(self._clients, _CONNECTED)

    def _handle_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 2 or not frames[1]:
            return
        sender, payload = frames
        if self._members.is_dead(sender):
            self._send(sender, FENCED)
            return
        try:
            if self._members.of_socket(sender) is None and len(payload) > self._settings.max_request_bytes:
                self._refuse_large(sender, payload)
                return
            message = msgpack.unpackb(payload, raw=False)
            if not isinstance(message, list) or not message or type(message[0]) not in (int, str):
                raise WireError("the message is not a list that begins with an int or a string")
            self._handle(sender, message[0], message[1:])
        except Exception as error:  # one bad message must not stop the service
            self._mailbox.ignore(sender, error)

    def _handle(self, sender: bytes, kind: Any, body: list[Any]) -> None:
        replica = self._members.of_socket(sender)
        if kind == HELLO:
            self._greet(sender, body)
        elif kind == KEYS and replica is not None:
            self._note_keys(replica, body)
        elif kind == Headers.CONNECT.value:
            self._clients.add(sender)
            self._send(sender, _CONNECTED)
        elif kind == Headers.ENGINE_REPLY.value and replica is not None:
            self._forward_replies(replica, body)
        elif kind == UNSENT and replica is not None:
            self._fail_unsent(replica, body)
        elif kind == Headers.SUBMIT_REQUEST.value and replica is None:
            self._clients.add(sender)
            self._submit(sender, body)
        elif kind in {signal.value for signal in SIGNALS} and replica is None:
            self._clients.add(sender)
            self._signals.ask(Headers(kind))
        elif replica is not None and kind in {answer.value for answer in ANSWERS.values()}:
            self._signals.answer(replica.name, Headers(kind))
        else:
            raise WireError(f"message kind {kind!r:.50} is not allowed from this sender")

    # Replicas.

    def _greet(self, sender: bytes, body: list[Any]) -> None:
        (greeting,) = body
        try:
            hello = hello_of(greeting)
            if not hmac.compare_digest(hello.proof.encode(), self._mailbox.proof.encode()):
                raise WireError("the hello message lacks the secret; start replicas as the coordinator's user")
            replica = self._members.greet(sender, hello)
        except WireError:
            if self._members.is_dead(sender):
                self._send(sender, FENCED)
            raise
        if replica.is_complete:
            self._router.join(replica.name)
            self._send_all(replica.members.values(), WELCOME)
            for header in self._signals.missed():
                self._send(replica.identity, msgpack.packb([header.value]))
            logger.info("replica %s has joined", replica.name)

    def _note_keys(self, replica: Replica, body: list[Any]) -> None:
        (news,) = body
        report = report_of(news)
        if report.salt is not None:
            replica.salt = report.salt
        if report.changes.were_flushed:
            self._router.flush(replica.name)
        self._router.drop(replica.name, report.changes.dropped)
        self._router.publish(replica.name, report.changes.published)

    def _lose(self, identity: bytes, reason: str) -> None:
        """Remove a dead replica and all replicas in its domain; send their requests to other replicas."""
        buried = self._members.bury(identity)
        names = {replica.name for replica in buried}
        orphans = [request for request in self._in_flight if request.replica in names]
        for replica in buried:  # remove all dead replicas before re-routing requests
            logger.error("replica %s is dead: %s", replica.name, reason)
            self._router.leave(replica.name)
            self._send_all(replica.members.values(), FENCED)  # remaining members cannot continue alone
        # Unassign all requests before sending any, because a failed send may drop other requests of the client.
        for request in orphans:
            request.replica = None
        for request in orphans:
            self._dispatch(request)

    # Requests.

    def _submit(self, client: bytes, body: list[Any]) -> None:
        client_request_id, prompt, sampling = body
        if not isinstance(sampling, dict):
            raise WireError(f"the sampling parameters of a request must be a dict, found {sampling!r:.50}")
        request = self._entered(client, client_request_id, prompt)
        try:
            request.sampling = readable_sampling(sampling)
            request.tokens = prompt_tokens(prompt, self.tokenizer, bool(sampling.get("add_BOS", False)))
            self._in_flight.charge(request)
        except PendingLimitError as error:
            self._fail(request, str(error))
        except Exception as error:
            self._fail(request, f"the request cannot be read: {error}")
        else:
            request.arrive(int(time.time()))
            self._dispatch(request)

    def _refuse_large(self, client: bytes, payload: bytes) -> None:
        """Fail the request in a message that exceeds the size limit; raise `WireError` if it is not a request."""
        kind, client_request_id = opening_of(payload)
        problem = f"a message of {len(payload)} bytes, above max_request_bytes={self._settings.max_request_bytes}"
        if kind != Headers.SUBMIT_REQUEST.value:
            raise WireError(problem)
        self._clients.add(client)
        self._fail(self._entered(client, client_request_id, ""), problem)

    def _entered(self, client: bytes, client_request_id: Any, prompt: Any) -> RequestInFlight:
        if type(client_request_id) is not int:
            raise WireError(f"the client's request id is {client_request_id!r:.50}; it must be an int")
        request = RequestInFlight(self.next_request_id, client, client_request_id, prompt, [], {})
        self._in_flight.add(request)
        self.next_request_id += 1
        return request

    def _dispatch(self, request: RequestInFlight) -> None:
        """Send an unassigned request to a replica; fail the request if no replica may get it."""
        if request not in self._in_flight:
            return  # the client has disconnected in the meantime
        if self._signals.is_stopping:
            self._fail(request, "the engines are being stopped; send it to others")
        elif request.is_aborted:
            self._fail(request, "it was aborted, and its replica died before it could send the tokens")
        elif not self._router.replicas:
            self._fail(request, "no replica is left; start one and send the request again")
        elif request.num_attempts >= self._settings.num_attempts:
            self._fail(request, f"the {request.num_attempts} replicas that it was sent to died; see their logs")
        else:
            request.num_attempts += 1
            keys = PromptKeys(request.tokens, request.tenant)
            route = self._router.route(request.request_id, lambda name: self._blocks(request, keys, name))
            request.replica = route.replica
            self._send(self._members[route.replica].identity, request.submission())

    def _blocks(self, request: RequestInFlight, keys: PromptKeys, name: ReplicaName) -> PromptBlocks:
        salt = self._members[name].salt
        if salt is None:
            return PromptBlocks((), 1, len(request.tokens), request.max_new_tokens)
        return PromptBlocks(keys.under(salt), salt.block_size, len(request.tokens), request.max_new_tokens)

    def _forward_replies(self, replica: Replica, body: list[Any]) -> None:
        (records,) = body
        for record in records:
            try:
                self._forward_reply(replica, record)
            except Exception as error:  # a bad record must not block the other records in the message
                logger.warning("ignored a reply of %s: %s: %s", replica.name, type(error).__name__, error)

    def _forward_reply(self, replica: Replica, record: Any) -> None:
        request = self._in_flight.get(record["requests"][0]["request_id"])
        if request is None or request.replica != replica.name:
            return  # the request was re-routed to another replica
        try:
            self.detokenize(record)
            reply = request.reply(record)
        except Exception as error:
            self._fail(request, f"its reply cannot be read or turned into text: {error}")
            return
        self._finish(request)
        self._send(request.client, reply)

    def _fail_unsent(self, replica: Replica, body: list[Any]) -> None:
        """Fail and cancel a request whose reply or progress the replica could not send, because it is too large."""
        unsent = unsent_of(body)
        request = self._in_flight.get(unsent.request_id)
        if request is not None and request.replica == replica.name:
            self._fail(request, unsent.reason)
            self._send(replica.identity, pack_cancel(request.request_id))

    def _fail(self, request: RequestInFlight, reason: str) -> None:
        if request in self._in_flight:
            self._finish(request)
            self._send(request.client, request.reply(failed_record(request, reason)))

    def _finish(self, request: RequestInFlight) -> None:
        self._in_flight.remove(request)
        self._router.finish(request.request_id)

    def _forget_client(self, identity: bytes) -> None:
        self._clients.discard(identity)

    # All connections.

    def _announce(self) -> None:
        """Send all due control messages; fail unfinished requests after the final answer to STOP."""
        for announcement in self._signals.due({replica.name for replica in self._members.serving}):
            if self._signals.is_over:
                for request in self._in_flight:
                    self._fail(request, "the engines were stopped before it was done")
            message = msgpack.packb([announcement.header.value])
            self._send_all((replica.identity for replica in self._members.serving), message)
            if announcement.is_for_clients:
                self._send_all(self._clients, msgpack.packb([announcement.header.value, b""]))

    def _send_all(self, identities: Iterable[bytes], message: bytes) -> None:
        for identity in list(identities):
            self._send(identity, message)

    def _send(self, identity: bytes, message: bytes) -> None:
        """Send a message; if that fails, remove the recipient: a client is dropped, a replica is treated as dead."""
        try:
            self._mailbox.send(identity, message)
        except zmq.ZMQError as error:
            if identity in self._clients:
                self._forget_client(identity)
            if self._members.of_socket(identity) is not None:
                self._lose(identity, f"its process has ended, or cannot be reached ({error})")
