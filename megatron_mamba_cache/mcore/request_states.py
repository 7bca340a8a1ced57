"""State that the engine keeps for each request in addition to Megatron's record."""

import io
import time
from base64 import b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from megatron.core.inference.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord, Status
from typing_extensions import override

from ..policy.kept_tokens import TokenRoutes
from ..policy.requests import Candidate, RunningRequest

_REMEMBERED_REQUESTS = 65_536
ROUTED_EXPERTS = "routed_experts"
"""Attribute of a reply's sampling parameters that holds the result of `encoded_routes`."""


class DraftCounts(NamedTuple):
    """Numbers of a request's draft tokens that were verified and that were accepted."""

    drafted: int = 0
    accepted: int = 0


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Numbers of a request's cached tokens that were restored from host memory and from disk."""

    from_host: int = 0
    from_disk: int = 0


class VersionStart(NamedTuple):
    """Version of the weights that generated a request's tokens from index `first_token` on."""

    weights_version: str
    first_token: int = 0


@dataclass(slots=True)
class RequestState:
    """State that the engine keeps for a request in addition to Megatron's record."""

    candidate: Candidate  # queue entry, used again after an interruption
    cached_tokens: int | None = None  # number of prompt tokens that needed no prefill at the first admission
    tiers: TierTokens = TierTokens()  # numbers of these tokens that were restored from lower tiers
    admitted_at: float | None = None  # monotonic clock in seconds at the first admission; not used for scheduling
    running: RunningRequest | None = None  # newest admission of the request, which may have ended
    num_written_before: int = 0  # number of prompt tokens cached by earlier admissions
    num_drafted: int = 0  # number of verified draft tokens, over all admissions
    num_accepted: int = 0  # number of accepted draft tokens
    versions: tuple[VersionStart, ...] = ()  # versions of the weights before the current one that generated tokens

    def admit(self, running: RunningRequest) -> None:
        """Record an admission; `cached_tokens` and `tiers` are set only by the first."""
        if self.cached_tokens is None:
            self.cached_tokens = running.computed
            self.tiers = TierTokens(running.from_host, running.from_disk)
            self.admitted_at = time.monotonic()
        self.num_written_before = self.num_written
        self.running = running

    @property
    def age(self) -> int | None:
        """Sequence number of the request's first admission; None before it."""
        return None if self.running is None else self.running.age

    @property
    def routes(self) -> TokenRoutes | None:
        """Routed experts of the request's tokens; None if they are not recorded, or it has not ended."""
        return None if self.running is None else self.running.routes

    @property
    def num_written(self) -> int:
        """Number of prompt tokens that the request has newly cached, over all admissions."""
        return self.num_written_before + (0 if self.running is None else self.running.num_written)


@dataclass(kw_only=True)
class EndedRequest(DynamicInferenceRequest):
    """Megatron's merged request with the routed experts of its tokens."""

    routes: TokenRoutes | None = None

    @property
    def routed_experts(self) -> npt.NDArray[np.int16] | None:
        """Experts of each prompt and generated token, [tokens, MoE layers, experts per token] int16.

        They are -1 where unknown, as for the last token, which was never an input. None if routes are not recorded, or
        the request has failed. The first access may wait for the copy from the device.
        """
        return None if self.routes is None else self.routes.array()


@dataclass(kw_only=True)
class RequestRecord(DynamicInferenceRequestRecord):
    """Megatron's record, which returns a request's routed experts when it is merged."""

    state: RequestState | None = None  # not serialized

    @override
    def merge(self, tokenizer: Any = None) -> EndedRequest:
        """Merge the parts of the record into one request."""
        merged = super().merge(tokenizer)
        return EndedRequest(**{field.name: getattr(merged, field.name) for field in fields(merged)}, routes=self.routes)

    @property
    def routes(self) -> TokenRoutes | None:
        """Routed experts of the request, which may still be copied to the host; None if there are none."""
        return None if self.state is None else self.state.routes

    @override
    def serialize(self) -> dict[str, Any]:
        """Return a dict that msgpack can serialize."""
        found: dict[str, Any] = super().serialize()
        del found["state"]
        return found


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Counts for a request, which are also kept for a while after it has left the engine."""

    cached_tokens: int = 0
    tiers: TierTokens = TierTokens()
    num_written: int = 0
    drafts: DraftCounts = NO_DRAFTS
    admitted_at: float | None = None
    versions: tuple[VersionStart, ...] = ()

    @property
    def running_seconds(self) -> float:
        """Seconds since the first admission; 0 before it."""
        return 0.0 if self.admitted_at is None else time.monotonic() - self.admitted_at

    def as_mapping(self) -> dict[str, Any]:
        """Return the counts, keyed by their names in replies."""
        return {
            "cached_tokens": self.cached_tokens,
            "cached_tokens_from_host": self.tiers.from_host,
            "cached_tokens_from_disk": self.tiers.from_disk,
            "written_tokens": self.num_written,
            "running_s": self.running_seconds,
            "draft_tokens": self.drafts.drafted,
            "accepted_tokens": self.drafts.accepted,
        }


class RequestStates(dict[int, RequestState]):
    """Map from request id to `RequestState`, which also keeps the counts of recent requests that have left."""

    def __init__(self) -> None:
        super().__init__()
        self.weights_version = ""  # of the weights that compute the next step to be reported
        self._left: dict[int, RequestCounts] = {}  # oldest first

    def leave(self, request_id: int) -> None:
        """Discard the state of a request that leaves the engine, but keep its counts; do nothing for an unknown id."""
        if request_id not in self:
            return
        self._left[request_id] = self.counts_of(request_id)
        del self[request_id]
        while len(self._left) > _REMEMBERED_REQUESTS:
            del self._left[next(iter(self._left))]

    def counts_of(self, request_id: int) -> RequestCounts:
        """Return the counts for a request so far; zeros if they are no longer kept."""
        state = self.get(request_id)
        if state is None:
            return self._left.get(request_id, RequestCounts())
        return RequestCounts(
            state.cached_tokens or 0,
            state.tiers,
            state.num_written,
            DraftCounts(state.num_drafted, state.num_accepted),
            state.admitted_at,
            state.versions or (VersionStart(self.weights_version),),
        )

    def change_version(self, weights_version: str, num_generated: Callable[[int], int]) -> None:
        """Set the version of the weights that generate all further tokens.

        Args:
            num_generated: Function that returns how many tokens a request, given by its id, has generated.
        """
        for request_id, state in self.items() if weights_version != self.weights_version else ():
            if count := num_generated(request_id):
                before = state.versions or (VersionStart(self.weights_version),)
                kept = (start for start in before if start.first_token < count)
                state.versions = (*kept, VersionStart(weights_version, count))
        self.weights_version = weights_version


def encoded_routes(routes: TokenRoutes | str | None) -> str | None:
    """Return routed experts as an .npy file in base64; text that is encoded already and None are returned unchanged."""
    if routes is None or isinstance(routes, str):
        return routes
    file = io.BytesIO()
    np.save(file, routes.array())
    return b64encode(file.getvalue()).decode()


def begin_next_part(record: DynamicInferenceRequestRecord) -> None:
    """Start a new part in an interrupted request's record, unless the newest part has no token.

    A part only collects results; when the request runs again, it starts from its spec and all of its tokens.
    """
    if record[-1].generated_tokens:
        record.checkpoint()
        record[-1].status = Status.ACTIVE_AND_GENERATING_TOKENS
        # The first part of the record contains the prompt's log-probs.
        without_prompt = {"return_prompt_top_n_logprobs": False, "skip_prompt_log_probs": True}
        record[-1].sampling_params.add_attributes(without_prompt)
    else:
        record[-1].prompt_log_probs = record[-1].generated_log_probs = None
        record[-1].prompt_top_n_logprobs = record[-1].generated_top_n_logprobs = None


def complete_parts(record: DynamicInferenceRequestRecord) -> None:
    """Add the empty lists that Megatron needs to merge the record's newest part with earlier parts."""
    newest = record[-1]
    newest.tpot = newest.tpot or []
    for name in ("prompt_log_probs", "generated_log_probs", "prompt_top_n_logprobs", "generated_top_n_logprobs"):
        if getattr(newest, name) is None and getattr(record[0], name) is not None:
            setattr(newest, name, [])


def tokens_after(count: int, parts: Iterable[Any], name: str = "generated_tokens") -> list[Any]:
    """Concatenate the generated tokens of all parts of a request's record, without the first `count`.

    Args:
        parts: Megatron requests that form one record.
        name: Attribute with one entry per generated token; an attribute that is None counts as empty.
    """
    found: list[Any] = []
    for part in parts:
        entries = getattr(part, name) or []
        found += entries[count:]
        count = max(count - len(entries), 0)
    return found
