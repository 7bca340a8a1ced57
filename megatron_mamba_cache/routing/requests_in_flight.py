"""Requests that replicas work on: those of a dead replica can be sent again, or be answered with an error."""

import time
from dataclasses import dataclass
from typing import Any

import msgpack
from megatron.core.inference.headers import Headers
from megatron.core.inference.sampling_params import SamplingParams

from ..policy.routing import ReplicaName
from .front_end import CANCELS, FLUSHES


@dataclass(slots=True)
class RequestInFlight:
    """A request of a client.

    Args:
        request_id: Of all clients' requests; the replicas know it by this.
        client: Socket identity.
        client_request_id: What the client calls it.
        prompt: Text or token ids, as the client sent it.
        tokens: The prompt as token ids.
        sampling: Megatron's sampling parameters as a dict, with whatever the client added to them.
    """

    request_id: int
    client: bytes
    client_request_id: int
    prompt: str | list[int]
    tokens: list[int]
    sampling: dict[str, Any]
    replica: ReplicaName | None = None
    num_attempts: int = 0

    @property
    def tenant(self) -> str:
        """Whose prefixes it may share."""
        tenant = self.sampling.get("tenant", "")
        return tenant if isinstance(tenant, str) else ""

    @property
    def max_new_tokens(self) -> int:
        """Tokens to generate at most, as far as the client said."""
        for name, before in (("num_tokens_to_generate", 0), ("num_tokens_total", len(self.tokens))):
            value = self.sampling.get(name)
            if isinstance(value, int):
                return max(value - before, 0)
        return 0

    def submission(self) -> bytes:
        """Return Megatron's message that gives it to a replica."""
        return msgpack.packb([Headers.SUBMIT_REQUEST.value, self.request_id, self.prompt, self.sampling])

    def reply(self, record: dict[str, Any]) -> bytes:
        """Return Megatron's message that gives its client a record."""
        return msgpack.packb([Headers.ENGINE_REPLY.value, self.client_request_id, record])


def readable_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters that every replica can read.

    Raises:
        ValueError: If Megatron would refuse them, or take them for something else than data.
    """
    for name in sampling:
        if name.startswith("_") or name in (CANCELS, FLUSHES) or callable(getattr(SamplingParams, name, None)):
            raise ValueError(f"sampling parameter {name!r} has a name that is taken; give it another one")
    try:
        SamplingParams.deserialize(dict(sampling))
    except Exception as error:
        raise ValueError(f"Megatron refuses the sampling parameters: {error or type(error).__name__}") from error
    return sampling


def failed_record(request: RequestInFlight, reason: str) -> dict[str, Any]:
    """Return Megatron's record of a request that failed outside of an engine, as `serialize` would make it.

    `InferenceClient` gives its caller the record; the reason is the message of its last event but one.
    """
    now = time.time()
    error = {
        "type": "ContextOverflowError",  # the only kind of error that Megatron's events carry
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
