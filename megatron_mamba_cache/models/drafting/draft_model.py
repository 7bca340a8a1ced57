"""Drafter that generates draft tokens with a smaller model, which has its own cache."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...config import CacheConfig
from ...kernels.sampling.greedy_draws import greedy_tokens
from ...kernels.sampling.sampling import sample_weighted, token_probabilities
from ...mcore.context import MambaCacheContext
from ...mcore.model_ranks import num_expert_ranks, ranks_of_process
from ...mcore.served_model import check_served, wrap_model
from ...mcore.step_reads import step_time_of
from ...metrics import CacheSnapshot
from ...policy.random_counter import DrawPurpose
from ...policy.requests import RunningRequest
from ...ranks.group import Ranks
from ...recurrences.model_shape import HybridModelShape
from ...speculation.drafter import Draft, DraftRequest
from ...step.captured_shapes import draft_shapes
from ...step.graphs import capture_graphs, reason_to_capture_again
from ...step.logits import Draws
from ...step.step import Step
from ...step.warmup import compile_ahead, rehearse_prefill, warm_up_prefill
from .held_requests import HeldRequest, HeldRequests

_LOG = logging.getLogger(__name__)


class DraftModelDrafter:
    """Drafter that generates draft tokens with a draft model: greedily for greedy requests, otherwise by sampling.

    The draft model has its own KV blocks, state slots and prefix cache, so a shared prefix is prefilled once. Each call
    processes the new text of all requests in one forward pass; a long prompt takes several calls, and its drafts are
    empty until the last. Every draft token after the first takes one more forward pass over all requests. A rejected
    draft needs no rollback: the live state holds only verified text, and drafts continue from it in a separate slot.
    When the draft model's memory is short, a request gets fewer draft tokens or none, but does not fail.

    Args:
        model: A MambaModel that `build_engine` accepts, with the same vocabulary as the engine's model.
        config: Settings of the draft model's cache; None for the defaults. `block_size_tokens` may differ from the
            engine's. A request with more than one draft token uses a second state slot. If `num_cuda_graphs` is set,
            graphs are captured at construction. Without graphs, the host takes many times as long to launch a forward
            pass as the GPU takes to run it. `num_speculative_tokens` and `decode_checkpoints` are ignored.

    Raises:
        ValueError: If the model cannot be served, its experts are split over expert-parallel ranks, or `config` does
            not suit the model.
        TypeError: If `model` is not a MambaModel.
    """

    def __init__(self, model: Any, config: CacheConfig | None = None) -> None:
        self._ranks = ranks = ranks_of_process()
        # One state in addition to the live state: the state after the newest draft token.
        states: dict[str, Any] = {"num_speculative_tokens": 1, "draft_states": "window", "record_routes": False}
        config = replace(config or CacheConfig(), **states)
        shape = check_served(model, ranks, config.max_sequence_length)
        check_draft_experts(shape, ranks)
        self._context = MambaCacheContext(config, shape, ranks=ranks)
        self._time = step_time_of(model, shape, self._context.cache_config, ranks)
        self._counters = self._context.counters
        self._model = wrap_model(model, self._context)
        self._held = HeldRequests(self._context)
        self._has_compiled = self.wants_graphs = False
        self.capture()

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, including padding."""
        return self._context.shape.vocab_size

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return the estimated seconds for one forward pass per draft token, each followed by a host sync."""
        return num_drafts * (self._time.seconds(num_requests, 0) + self._time.device.drafts_s)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order.


        A draft is empty if the draft model has not finished the request's prefill or has no memory for it, or if its
        text has not changed since the last call.
        """
        try:
            return self._propose(requests)
        except BaseException:
            self._held.abort_round({request.running.request_id for request in requests})
            raise

    def forget(self, request_id: int) -> None:
        """Free a request's memory; its published blocks and states stay cached. Ignore an unknown request."""
        self._held.forget(request_id)

    def warmup(self) -> None:
        """Compile all kernels that drafting launches, which are the prefill kernels."""
        self._compile_ahead()
        warm_up_prefill(self._model, self._context.runner)

    def flush(self, weights_version: str | None = None) -> None:
        """Drop the draft model's cache, because its weights changed.

        If the weights are at new addresses, CUDA graphs are dropped and captured again before the engine's next step.
        """
        self._held.drop_all()
        self._context.flush(weights_version)
        self.check_weights()

    def check_weights(self) -> None:
        reason = reason_to_capture_again(self._context.graphs, self._model, self._ranks)
        if reason is not None:
            _LOG.warning("a draft model's CUDA graphs are captured again: %s", reason)
            self.drop_graphs()

    def drop_graphs(self) -> None:
        runner = self._context.runner
        self.wants_graphs = self.wants_graphs or runner.graphs is not None
        runner.drop_graphs()

    def capture(self) -> None:
        self.wants_graphs = False  # do not retry if the capture fails
        runner, config = self._context.runner, self._context.cache_config
        shape, prepare = self._context.shape, self._compile_ahead
        shapes = draft_shapes(config, runner.memory.step_buffers.limits, shape.most_launched)
        runner.adopt_graphs(capture_graphs(self._model, runner, config, shape, shapes, prepare, DrawPurpose.DRAFT))

    def snapshot(self) -> CacheSnapshot:
        """Return the counters and the usage of slots and blocks.

        The prefill counters count verified tokens, and the decode counters count draft tokens that the model processed.
        """
        return self._context.snapshot()

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` if requests, blocks and slots are inconsistent."""
        self._held.check_integrity()

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        served = self._held.schedule(requests)
        if not served:
            return [Draft()] * len(requests)
        sampled = self._sample([held.running for held in served])
        self._held.publish(served)
        limits = {request.running.request_id: request.num_tokens for request in requests}
        started = {}
        for index, held in enumerate(served):
            running = held.running
            if running.computed == running.length:
                limit = self._held.room_for_drafts(held, limits[running.request_id])
                started[running.request_id] = unfinished = _UnfinishedDraft(held, limit)
                unfinished.append(sampled, index)
        while growing := [draft for draft in started.values() if len(draft.tokens) < draft.limit]:
            sampled = self._sample([draft.held.branch(draft.tokens) for draft in growing])
            self._counters.decode_tokens_computed += len(growing)
            for index, draft in enumerate(growing):
                draft.append(sampled, index)
        self._held.end_round(served)
        ids = [request.running.request_id for request in requests]
        return [started[request_id].finished() if request_id in started else Draft() for request_id in ids]

    def _sample(self, requests: Sequence[RunningRequest]) -> "_SampledTokens":
        """Run a forward pass over the scheduled requests and sample one token for each, with a single host sync."""
        runner, graphs = self._context.runner, self._context.graphs
        graph = None if graphs is None else graphs.fitting(requests)
        if graph is None:
            step = runner.begin(runner.lay_out(requests, purpose=DrawPurpose.DRAFT))
            output = self._model.compute_step()
        else:
            step = runner.begin(Step.of_graph(graph, requests, ()))
            output = graph.forward()
        settings, num_requests = step.batch.logits, len(requests)  # rows from num_requests on are padding
        if settings.draws is Draws.BEST and graph is not None:
            return _SampledTokens(graph.verify(Draws.BEST)[:num_requests, 1].tolist(), None)
        logits = runner.logits_on_all_ranks(step, output)[:num_requests]
        if settings.draws is Draws.BEST:
            return _SampledTokens(greedy_tokens(logits).tolist(), None)
        probabilities = token_probabilities(settings.sampling(logits))
        return _SampledTokens(sample_weighted(probabilities, settings.uniforms[:num_requests]).tolist(), probabilities)

    def _compile_ahead(self) -> None:
        if not self._has_compiled:
            self._has_compiled = True
            compile_ahead(self._model, self._context.runner, rehearse_prefill)


def check_draft_experts(shape: HybridModelShape, ranks: Ranks) -> None:
    """Raise `ValueError` if the draft model's experts are split over expert-parallel ranks; collective.

    These ranks must run each MoE layer together, but a rank drafts only when its own requests need drafts.
    """
    if num_expert_ranks() > 1 and any(ranks.gather(shape.has_experts)):
        raise ValueError(
            f"the draft model is an MoE model, and {num_expert_ranks()} expert-parallel ranks cannot share its experts "
            "because they draft at different times; use a draft model without experts, or tensor-parallel ranks"
        )


@dataclass(frozen=True, slots=True)
class _SampledTokens:
    """Tokens sampled after a forward pass, one per request, with distributions (None if all requests are greedy)."""

    tokens: list[int]
    probabilities: Tensor | None  # [requests, vocab] float64


@dataclass(slots=True)
class _UnfinishedDraft:
    """A request's draft under construction; each forward pass adds one token, up to `limit`."""

    held: HeldRequest
    limit: int
    tokens: list[int] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)

    def append(self, sampled: _SampledTokens, index: int) -> None:
        """Append the token that was sampled for the request at `index`."""
        self.tokens.append(sampled.tokens[index])
        if sampled.probabilities is not None and not self.held.running.spec.sampling.is_greedy:
            self.distributions.append(sampled.probabilities[index])

    def finished(self) -> Draft:
        """Return the tokens generated so far as a draft, with their distributions if they were sampled."""
        return Draft(tuple(self.tokens), torch.stack(self.distributions) if self.distributions else None)
