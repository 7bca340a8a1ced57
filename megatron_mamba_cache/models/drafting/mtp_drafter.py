"""Drafter that generates draft tokens with the model's multi-token prediction (MTP) head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import CacheIntegrityError
from ...mcore.expert_layer import exchange_of
from ...mcore.model_ranks import ranks_of_process
from ...mcore.mtp_chain import MTPChain
from ...mcore.mtp_head import MTPHead, RemoteHead
from ...mcore.step_reads import head_time_of
from ...policy.requests import RunningRequest
from ...speculation.drafter import Draft, DraftRequest
from ...speculation.short_list import ListedTokens, ShortList
from ...speculation.step_time import StepTime
from ...step.buffers import HostCopy
from ...step.captured_shapes import batch_sizes
from ...step.graphs import device_reason
from ...step.model import WeightAddresses
from ...step.overlapped_step import CapturedStep, GraphsByShape
from ...step.recorder import CudaRecorder, without_collections
from ...step.warmup import batch_sizes as warmup_sizes
from .mtp_passes import MTPPasses


def drafter_of(model: Any, head: MTPHead | RemoteHead) -> "MTPDrafter | DraftReceiver":
    """Return this rank's drafter; all ranks of the model must call this."""
    return MTPDrafter(model, head) if isinstance(head, MTPHead) else DraftReceiver(model)


class DraftReceiver:
    """Drafter of a pipeline stage without the MTP head: it receives the drafts of the last stage.

    Args:
        model: This rank's shard of the engine's model.
    """

    mtp_chain = None

    def __init__(self, model: Any) -> None:
        self.vocab_size = int(model.vocab_size)
        self._listed = ListedTokens.of(self.vocab_size)
        self._ranks = ranks_of_process()
        self._time: StepTime = self._ranks.gather(None)[-1]

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the drafts of the last stage; see `MTPDrafter.propose`."""
        lengths = [request.num_tokens for request in requests]
        if self._listed is not None:
            self._listed.count([request.running for request in requests])
        size = len(lengths), max(lengths)
        empty = torch.zeros(size, dtype=torch.int64, device=torch.cuda.current_device())
        return drafts_of(self._ranks.from_source(empty), lengths)

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return the last stage's estimate; see `MTPDrafter.draft_seconds`."""
        return num_drafts * self._time.seconds(num_requests, 0)

    def num_unlisted(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens the last stage may not draft."""
        return 0 if self._listed is None else self._listed.num_unlisted(tokens)

    def forget(self, request_id: int) -> None:
        """Stop counting a request's tokens."""
        if self._listed is not None:
            self._listed.forget(request_id)


def drafts_of(tokens: Tensor, lengths: Sequence[int]) -> list[Draft]:
    """Return drafts of these lengths from the rows of [requests, most drafts] tokens on the device."""
    rows = HostCopy(tokens).wait()
    return [Draft(tuple(row[:length])) for row, length in zip(rows, lengths, strict=True)]


class MTPDrafter:
    """Drafter that generates the most likely tokens with an MTP head, which is applied again for each further token.

    Each step of the model also writes the head's keys and values of all its tokens, into further layers of the same KV
    blocks, and stores the hidden state of the last token in the request's state slot. Drafts start from these. Entries
    that drafts write themselves are at positions that the next step writes again, before their block is published.

    All ranks of a model must build a drafter. On several pipeline stages, the last drafts for all. Expert-parallel
    ranks exchange tokens in the passes: all of them make the same number of passes of the same number of requests,
    without graphs.

    Args:
        model: This rank's shard of the engine's model.
        short_list: Tokens that may be drafted; None for a quarter of a large vocabulary, or for a whole small one.
    """

    passes_type = MTPPasses

    def __init__(self, model: Any, head: MTPHead, short_list: ShortList | None = None) -> None:
        self._short_list = short_list or ShortList.of(model)
        self.mtp_chain = MTPChain(model, head, self._short_list)
        self.vocab_size = int(model.vocab_size)
        self._ranks = ranks_of_process()
        time = head_time_of(model, head, len(self._short_list or range(self.vocab_size)))
        self._time: StepTime = self._ranks.gather(time)[-1]
        self._passes: MTPPasses | None = None
        self._captured_at: WeightAddresses | None = None
        self._exchange = exchange_of(head)
        self._agreed: tuple[int, int] | None = None  # numbers of requests and of passes
        self._steps: GraphsByShape | None = None  # graphs of the steps that captured drafts follow
        self._wants_graphs = self._exchange is None  # ranks would have to capture together

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order, of as many tokens as the request may have."""
        lengths, running = [request.num_tokens for request in requests], [request.running for request in requests]
        if self._short_list is not None:
            self._short_list.count(running)
        return drafts_of(self._ranks.from_source(self._passes_together(running, lengths)), lengths)

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return the estimated seconds of one pass for each draft of the longest."""
        return num_drafts * self._time.seconds(num_requests, 0)

    def can_follow(self, graph: CapturedStep) -> bool:
        """Return whether the drafts after steps of this graph have been captured."""
        return self._passes is not None and self._passes.can_follow(graph)

    @torch.inference_mode()
    def follow(self, graph: CapturedStep, requests: Sequence[RunningRequest]) -> None:
        """Launch the drafts after the running step of these requests, and complete the next step."""
        if self._short_list is not None:
            self._short_list.count(requests)
        self._passes_here().follow(graph, requests)

    def num_unlisted(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens the drafter may not draft."""
        return 0 if self._short_list is None else self._short_list.tokens.num_unlisted(tokens)

    def forget(self, request_id: int) -> None:
        """Stop counting a request's tokens; all other data of a request is in the engine's memory."""
        if self._short_list is not None:
            self._short_list.tokens.forget(request_id)

    @torch.inference_mode()
    def warmup(self) -> None:
        """Launch all kernels of passes once, to compile those still missing."""
        self._passes_here().rehearse(warmup_sizes(self.mtp_chain.context.cache_config.max_requests))

    @property
    def wants_graphs(self) -> bool:
        """True if graphs are not captured, or if the engine has captured its steps again since."""
        is_old = self._captured_at is not None and self._steps is not self.mtp_chain.context.runner.graphs
        return self._wants_graphs or is_old

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture passes for as many batch sizes as the engine captures."""
        self.drop_graphs()
        self._wants_graphs = False  # do not retry if the capture fails
        passes, config = self._passes_here(), self.mtp_chain.context.cache_config
        if not config.num_cuda_graphs or device_reason(passes.memory) is not None:
            return
        self._captured_at = self.mtp_chain.weight_addresses()  # before graphs exist, because a later one may fail
        recorder, self._steps = CudaRecorder(), self.mtp_chain.context.runner.graphs
        with without_collections():
            passes.capture(recorder, batch_sizes(config.num_cuda_graphs, config.max_requests))
            if self._steps is not None and self._ranks.num_ranks == 1:  # several ranks send drafts to one another
                passes.capture_following(recorder, self._steps.with_drafts)

    @torch.inference_mode()
    def check_weights(self) -> None:
        """Drop the graphs if weights have moved, and copy the rows of the short list again."""
        if self._short_list is not None:
            self._short_list.copy_rows()
        if (
            self._captured_at is not None
            and self._captured_at.first_change(self.mtp_chain.weight_addresses()) is not None
        ):
            self.drop_graphs()

    def drop_graphs(self) -> None:
        """Drop the graphs and all else that uses the engine's memory; both are made again for the next drafts."""
        self._passes = self._captured_at = self._steps = None
        self._wants_graphs = self._exchange is None

    @property
    def exchanges_tokens(self) -> bool:
        """True if expert-parallel ranks exchange tokens in the passes."""
        return self._exchange is not None

    def agree(self, num_requests: int, num_drafts: int) -> None:
        """Set the number of requests and of passes in which all expert-parallel ranks draft next."""
        self._agreed = (num_requests, num_drafts) if num_drafts else None

    @torch.inference_mode()
    def take_part(self) -> None:
        """Make the passes on which expert-parallel ranks agreed, unless this rank has made them."""
        if self._agreed is None or self._exchange is None:
            return
        with self._exchange.completed():
            self._passes_here().draft((), (), *self._agreed)
        self._agreed = None

    def _passes_together(self, requests: Sequence[RunningRequest], lengths: Sequence[int]) -> Tensor:
        if self._exchange is None:
            return self._passes_here().draft(requests, lengths)
        if self._agreed is None:
            raise CacheIntegrityError("expert-parallel ranks draft only in a step on which all agreed; call agree()")
        with self._exchange.counted():
            drafts = self._passes_here().draft(requests, lengths, *self._agreed)
        self._agreed = None
        return drafts

    def _passes_here(self) -> MTPPasses:
        """Return the passes over the memory that the engine has now."""
        if self._passes is None:
            config, memory = self.mtp_chain.context.cache_config, self.mtp_chain.context.memory
            self._passes = self.passes_type(self.mtp_chain, memory, config.num_speculative_tokens)
        return self._passes
