"""Drafter that generates draft tokens with the model's multi-token prediction (MTP) head."""

from collections.abc import Sequence
from typing import Any

import torch

from ...mcore.model_ranks import num_expert_ranks, ranks_of_process
from ...mcore.mtp_chain import MTPChain
from ...mcore.mtp_head import MTPHead
from ...mcore.step_reads import head_time_of
from ...speculation.drafter import Draft, DraftRequest
from ...speculation.short_list import ShortList
from ...step.captured_shapes import batch_sizes
from ...step.graphs import device_reason
from ...step.model import WeightAddresses
from ...step.recorder import CudaRecorder, without_collections
from ...step.warmup import batch_sizes as warmup_sizes
from .mtp_passes import MTPPasses


def is_split() -> bool:
    """Return True if this process has only a part of the model, whose head cannot draft alone."""
    return max(ranks_of_process().num_ranks, num_expert_ranks()) > 1


class MTPDrafter:
    """Drafter that generates the most likely tokens with an MTP head, which is applied again for each further token.

    Each step of the model also writes the head's keys and values of all its tokens, into further layers of the same KV
    blocks, and stores the hidden state of the last token in the request's state slot. Drafts start from these. Entries
    that drafts write themselves are at positions that the next step writes again, before their block is published.

    Args:
        model: The engine's model.
        short_list: Tokens that may be drafted; None for a quarter of a large vocabulary, or for a whole small one.

    Raises:
        ValueError: If the model is split over several ranks.
    """

    def __init__(self, model: Any, head: MTPHead, short_list: ShortList | None = None) -> None:
        if is_split():
            raise ValueError("drafts with an MTP head need a model on a single rank; use another drafter")
        self._short_list = short_list or ShortList.of(model)
        self.mtp_chain = MTPChain(model, head, self._short_list)
        self.vocab_size = int(model.vocab_size)
        self._time = head_time_of(model, head, len(self._short_list or range(self.vocab_size)))
        self._passes: MTPPasses | None = None
        self._captured_at: WeightAddresses | None = None
        self.wants_graphs = True

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order, of as many tokens as the request may have."""
        lengths, running = [request.num_tokens for request in requests], [request.running for request in requests]
        if self._short_list is not None:
            self._short_list.count(running)
        found = self._passes_here().draft(running, lengths)
        return [Draft(tuple(tokens[:length])) for tokens, length in zip(found, lengths, strict=True)]

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return the estimated seconds of one pass for each draft of the longest."""
        return num_drafts * self._time.seconds(num_requests, 0)

    def is_listed(self, token: int) -> bool:
        """Return True if the drafter may draft this token."""
        return self._short_list is None or token in self._short_list

    def forget(self, request_id: int) -> None:
        """Stop counting a request's tokens; all other data of a request is in the engine's memory."""
        if self._short_list is not None:
            self._short_list.forget(request_id)

    @torch.inference_mode()
    def warmup(self) -> None:
        """Launch all kernels of passes once, to compile those still missing."""
        self._passes_here().rehearse(warmup_sizes(self.mtp_chain.context.cache_config.max_requests))

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture passes for as many batch sizes as the engine captures."""
        self.wants_graphs = False  # do not retry if the capture fails
        passes, config = self._passes_here(), self.mtp_chain.context.cache_config
        if not config.num_cuda_graphs or device_reason(passes.memory) is not None:
            return
        self._captured_at = self.mtp_chain.weight_addresses()  # before graphs exist, because a later one may fail
        with without_collections():
            passes.capture(CudaRecorder(), batch_sizes(config.num_cuda_graphs, config.max_requests))

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
        self._passes = self._captured_at = None
        self.wants_graphs = True

    def _passes_here(self) -> MTPPasses:
        """Return the passes over the memory that the engine has now."""
        if self._passes is None:
            config, memory = self.mtp_chain.context.cache_config, self.mtp_chain.context.memory
            self._passes = MTPPasses(self.mtp_chain, memory, config.num_speculative_tokens)
        return self._passes
