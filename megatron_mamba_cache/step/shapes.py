"""Pad steps to the shapes of captured graphs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..policy.block_hashing import BlockKeyChain
from ..policy.identifiers import BlockId, SlotId
from ..policy.request_settings import RequestSpec, SamplingSettings
from ..policy.requests import ReservedState, RunningRequest, StateCursor, num_decoding
from ..recurrences.batches import PAD_SLOT
from .buffers import StepBuffers

_GREEDY = SamplingSettings(top_k=1)


def prefill_padding_request(num_tokens: int, dummy_block: BlockId) -> RunningRequest:
    """Return a padding request that prefills `num_tokens` >= 0 tokens; its prompt has at least one token."""
    request = _padding_request(
        RequestSpec(-1, np.zeros(max(1, num_tokens), np.int64), 2 + num_tokens, _GREEDY), dummy_block
    )
    request.schedule(num_tokens)
    return request


def decode_padding_request(num_tokens: int, dummy_block: BlockId) -> RunningRequest:
    """Return a padding request that decodes one token and `num_tokens` - 1 drafts; with 0, it computes no token."""
    request = _padding_request(RequestSpec(-1, np.zeros(0, np.int64), 2, _GREEDY), dummy_block)
    if num_tokens:
        request.append([0])
        request.schedule(num_tokens, (0,) * (num_tokens - 1))
        request.reserve(ReservedState(0, SlotId(PAD_SLOT)))
    return request


def _padding_request(spec: RequestSpec, dummy_block: BlockId) -> RunningRequest:
    return RunningRequest(
        spec=spec,
        chain=BlockKeyChain(bytes(32), 1),
        epoch=-1,
        age=-1,
        cursor=StateCursor(SlotId(PAD_SLOT)),
        block_ids=[dummy_block],
        num_shared_blocks=0,
        computed=0,
    )


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Numbers of requests and tokens in a captured step; decode requests come first, then prefill requests.

    Decode requests have up to `width` tokens each. With prefill requests, `width` is 1, so that prefill tokens start
    after one token per decode request.
    """

    num_decode_requests: int = 0
    width: int = 1
    num_prefill_requests: int = 0
    num_prefill_tokens: int = 0

    @property
    def num_requests(self) -> int:
        """Number of requests, padding included."""
        return self.num_decode_requests + self.num_prefill_requests

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the graph computes."""
        return self.num_decode_requests * self.width + self.num_prefill_tokens

    @property
    def num_logits(self) -> int:
        """Number of tokens whose logits the graph computes."""
        return self.num_decode_requests * self.width + self.num_prefill_requests

    @property
    def most_queries(self) -> tuple[int, ...]:
        """Query length of each request in the most uneven batch: the first prefill request has all prefill tokens."""
        others = (0,) * (self.num_prefill_requests - 1)
        prefilling = (self.num_prefill_tokens, *others) if self.num_prefill_requests else ()
        return (self.width,) * self.num_decode_requests + prefilling

    def num_chunks(self, grain: int) -> int:
        """Return the maximum number of prefill chunks; each request can have two partial chunks."""
        return self.num_prefill_tokens // grain + 2 * self.num_prefill_requests

    @staticmethod
    def of(requests: Sequence[RunningRequest]) -> "StepShape":
        """Return the smallest shape into which the requests fit."""
        num_decode = num_decoding(requests)
        width = max((request.scheduled for request in requests[:num_decode]), default=1)
        prefilling = requests[num_decode:]
        return StepShape(num_decode, width, len(prefilling), sum(request.scheduled for request in prefilling))

    def holds(self, step: "StepShape") -> bool:
        """Return whether a step fits; shapes with prefill hold only steps with prefill, and vice versa."""
        return (
            step.num_decode_requests <= self.num_decode_requests
            and step.width <= self.width
            and step.num_prefill_requests <= self.num_prefill_requests
            and step.num_prefill_tokens <= self.num_prefill_tokens
            and bool(step.num_prefill_requests) == bool(self.num_prefill_requests)
        )

    def fullest_requests(self, dummy_block: BlockId) -> list[RunningRequest]:
        """Return padding requests that fill the shape, with one or more tokens each; graphs are captured with them."""
        decoding = [decode_padding_request(self.width, dummy_block) for _ in range(self.num_decode_requests)]
        lengths = [1] * self.num_prefill_requests
        if lengths:
            lengths[0] += self.num_prefill_tokens - len(lengths)
        return decoding + [prefill_padding_request(length, dummy_block) for length in lengths]

    def pad(self, requests: Sequence[RunningRequest], dummy_block: BlockId) -> list[RunningRequest]:
        """Return the requests with padding requests inserted, so that each request is at its index in `row_indices`."""
        num_decode = num_decoding(requests)
        num_between = self.num_decode_requests - num_decode
        num_after = self.num_prefill_requests - (len(requests) - num_decode)
        between = [decode_padding_request(1 if self.num_prefill_requests else 0, dummy_block)] if num_between else []
        after = [prefill_padding_request(0, dummy_block)] if num_after else []
        return [*requests[:num_decode], *between * num_between, *requests[num_decode:], *after * num_after]

    def row_indices(self, requests: Sequence[RunningRequest]) -> tuple[int, ...]:
        """Return the index of each request in the padded step."""
        num_decode = num_decoding(requests)
        num_prefilling = len(requests) - num_decode
        return (*range(num_decode), *range(self.num_decode_requests, self.num_decode_requests + num_prefilling))


def smallest_holding(step: StepShape, shapes: Iterable[StepShape]) -> StepShape | None:
    """Return the smallest shape that a step fits, by width, then prefill requests, then tokens; None if none fits."""
    fitting = [shape for shape in shapes if shape.holds(step)]
    return min(fitting, key=lambda shape: (shape.width, shape.num_prefill_requests, shape.num_tokens), default=None)


def pad_tail(
    padded: Sequence[RunningRequest], buffers: StepBuffers, dummy_block: int, shape: StepShape, num_chunks: int
) -> None:
    """Write padding after a packed step in the buffers, up to the tokens and logits of the shape and `num_chunks`."""
    num_requests = len(padded)
    tokens = slice(int(buffers.host("cu_query")[num_requests]), shape.num_tokens)
    for name in ("token_ids", "token_positions"):
        buffers.host_int64(name)[tokens] = 0
    for name, value in (("token_blocks", dummy_block), ("token_offsets", 0)):
        buffers.host(name)[tokens] = value
    if buffers.limits.marks_real_tokens:
        buffers.host("real_tokens")[tokens] = 0
    logits = slice(int(buffers.host("cu_logits")[num_requests]), shape.num_logits)
    for name in ("logit_tokens", "logit_requests"):
        buffers.host(name)[logits] = 0
    for name in ("uniforms", "accept_uniforms", "residual_uniforms"):
        buffers.host(name).view(np.float64)[logits] = 0.0
    if shape.num_prefill_requests:
        written = int(buffers.host("cu_request_chunks")[shape.num_prefill_requests])
        buffers.host("cu_chunks")[written + 1 : num_chunks + 1] = buffers.host("cu_chunks")[written]
        buffers.host("chunk_requests")[written:num_chunks] = 0
        buffers.host("chunk_slots")[written:num_chunks] = PAD_SLOT
