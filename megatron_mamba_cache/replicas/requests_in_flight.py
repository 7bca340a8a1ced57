"""Registry of unfinished requests, with the data needed to send them again if their replica dies."""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
from megatron.core.inference.headers import Headers
from megatron.core.inference.sampling_params import SamplingParams

from ..mcore.request_spec import SPEC
from ..policy.routing import ReplicaName
from .front_end import ABORTS, CANCELS, FLUSHES
from .wire import packed

_CLIENTS_SHARE = 4
_TOKEN_BYTES = 8
_REQUEST_BYTES = 1024  # estimated size of a request without its prompt and parameters
_MOST_NESTED = 8
_MOST_NEW_TOKENS = 2**20  # limit for the router's estimate of a request's work; replicas enforce the actual limit


@dataclass(slots=True)
class RequestInFlight:
    """Unfinished request from a client, and the replica that serves it.

    Args:
        request_id: Id that the coordinator has assigned and replicas use, unique over all clients.
        client: Socket identity of the client.
        client_request_id: Id that the client has assigned.
        prompt: Text or token ids that the client has sent.
        sampling: Megatron's sampling parameters as a dict, including parameters that the client has added.
    """

    request_id: int
    client: bytes
    client_request_id: int
    prompt: str | list[int]
    tokens: list[int]
    sampling: dict[str, Any]
    num_bytes: int = 0
    replica: ReplicaName | None = None
    num_attempts: int = 0
    is_aborted: bool = False

    @property
    def tenant(self) -> str:
        """Tenant whose prefixes the request may reuse."""
        tenant = self.sampling.get(SPEC, {}).get("tenant", "")
        return tenant if isinstance(tenant, str) else ""

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens to generate; 0 if the client set no limit."""
        for name, before in (("num_tokens_to_generate", 0), ("num_tokens_total", len(self.tokens))):
            value = self.sampling.get(name)
            if isinstance(value, int):
                return min(max(value - before, 0), _MOST_NEW_TOKENS)
        return 0

    def arrive(self, at_s: int) -> None:
        """Add the arrival time, in seconds since the epoch, to the sampling parameters."""
        self.sampling = {**self.sampling, SPEC: {**self.sampling.get(SPEC, {}), "arrived_s": at_s}}

    def size(self) -> int:
        """Return the approximate size of the request in bytes."""
        text = len(self.prompt) if isinstance(self.prompt, str) else 0
        return text + _TOKEN_BYTES * len(self.tokens) + len(msgpack.packb(self.sampling)) + _REQUEST_BYTES

    def submission(self) -> bytes:
        """Return the packed message that submits the request to a replica."""
        return packed(Headers.SUBMIT_REQUEST.value, self.request_id, self.prompt, self.sampling)

    def reply(self, record: dict[str, Any]) -> bytes:
        """Return the packed message that sends a finished request's record to the client."""
        return packed(Headers.ENGINE_REPLY.value, self.client_request_id, record)


class PendingLimitError(ValueError):
    """Raised if the unfinished requests exceed the size limit for one client or for all clients."""


class RequestsInFlight:
    """All unfinished requests, which can be looked up by the coordinator's id or by the client's id.

    Args:
        max_bytes: Maximum total size of the requests; see `RoutingSettings.max_pending_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._bytes_of: defaultdict[bytes, int] = defaultdict(int)
        self._requests: dict[int, RequestInFlight] = {}
        self._of_client: defaultdict[bytes, dict[int, RequestInFlight]] = defaultdict(dict)

    def __iter__(self) -> Iterator[RequestInFlight]:
        return iter(list(self._requests.values()))

    def __contains__(self, request: RequestInFlight) -> bool:
        return self._requests.get(request.request_id) is request

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: int) -> RequestInFlight | None:
        """Return the request with an id of the coordinator; None if it does not exist or has ended."""
        return self._requests.get(request_id)

    def of_client(self, client: bytes) -> list[RequestInFlight]:
        """Return all requests from a client."""
        return list(self._of_client[client].values()) if client in self._of_client else []

    def find(self, client: bytes, client_request_id: int) -> RequestInFlight | None:
        """Return the request with an id of the client; None if it does not exist or has ended."""
        return self._of_client[client].get(client_request_id) if client in self._of_client else None

    def add(self, request: RequestInFlight) -> None:
        """Add a request; raise `ValueError` if the client has an unfinished request with the same id."""
        if self.find(request.client, request.client_request_id) is not None:
            raise ValueError(f"request {request.client_request_id} of this client is unfinished; use another id")
        self._requests[request.request_id] = request
        self._of_client[request.client][request.client_request_id] = request

    def charge(self, request: RequestInFlight) -> None:
        """Count a request's size towards the limits until the request is removed.

        Raises:
            PendingLimitError: If the client, or all clients together, now exceed their limit. The request is counted
                nevertheless.
        """
        request.num_bytes = request.size()
        self._num_bytes += request.num_bytes
        self._bytes_of[request.client] += request.num_bytes
        of_client = self._bytes_of[request.client]
        if of_client > self._max_bytes // _CLIENTS_SHARE or self._num_bytes > self._max_bytes:
            raise PendingLimitError(
                f"this client's unfinished requests have {of_client} bytes (limit {self._max_bytes // _CLIENTS_SHARE}) "
                f"and those of all clients {self._num_bytes} bytes (limit max_pending_bytes={self._max_bytes}); wait "
                "for replies before sending more"
            )

    def remove(self, request: RequestInFlight) -> None:
        """Remove a request, and its size from the totals."""
        del self._requests[request.request_id]
        own = self._of_client[request.client]
        del own[request.client_request_id]
        self._num_bytes -= request.num_bytes
        self._bytes_of[request.client] -= request.num_bytes
        if not own:
            del self._of_client[request.client], self._bytes_of[request.client]


def readable_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    """Check that replicas can safely read a client's sampling parameters, and return them unchanged.

    Raises:
        ValueError: If Megatron would reject them, or if a name or value could change more than sampling.
    """
    if not _is_plain(sampling, _MOST_NESTED):
        raise ValueError(f"sampling parameters must be plain values or lists nested at most {_MOST_NESTED} deep")
    for name in sampling:
        if name.startswith("_") or name in (ABORTS, CANCELS, FLUSHES) or callable(getattr(SamplingParams, name, None)):
            raise ValueError(f"sampling parameter {name!r} has a reserved name; rename it")
    if not isinstance(sampling.get(SPEC, {}), dict):
        raise ValueError(f"sampling parameter {SPEC!r} is {sampling[SPEC]!r:.100}; it must be a mapping")
    try:
        SamplingParams.deserialize(dict(sampling))
    except Exception as error:
        raise ValueError(f"Megatron rejects the sampling parameters: {error or type(error).__name__}") from error
    return sampling


def _is_plain(value: Any, most_nested: int) -> bool:
    if isinstance(value, dict):
        return most_nested > 0 and all(
            type(name) is str and _is_plain(inner, most_nested - 1) for name, inner in value.items()
        )
    if isinstance(value, list):
        return most_nested > 0 and all(_is_plain(inner, most_nested - 1) for inner in value)
    return value is None or isinstance(value, bool | int | float | str | bytes)


def failed_record(request: RequestInFlight, reason: str) -> dict[str, Any]:
    """Return a record, serialized as by Megatron, for a request that failed before an engine could serve it."""
    now = time.time()
    error = {
        "type": "ContextOverflowError",  # the only error type in Megatron's events
        "request_id": request.request_id,
        "message": reason,
        "is_transient": False,
    }
    failed = {
        "request_id": request.request_id,
        "prompt": request.prompt if isinstance(request.prompt, str) else None,
        "prompt_tokens": ["tensor", request.tokens],
        "sampling_params": request.sampling,
        "inference_parameters": None,
        "status": "FAILED",
        "generated_tokens": [],
        "generated_text": "",
        "generated_length": 0,
        "tpot": [],
        "events": [
            {"timestamp": now, "type": "ERROR_NONTRANSIENT", "payload": error},
            {"timestamp": now, "type": "FAIL", "payload": None},
        ],
    }
    return {"requests": [failed], "latency": None}
