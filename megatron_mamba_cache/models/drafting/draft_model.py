"""A drafter that runs a smaller model, with its own cache."""

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
from ...mcore.model_reading import step_time_of
from ...mcore.served_model import check_served, wrap_model
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
    """Draft what a draft model would generate: its best tokens for greedy requests, else sampled ones.

    It has its own KV blocks, state slots and prefix cache, so a shared prefix is prefilled once. A call computes each
    request's new text in one forward; a long prompt takes several calls, and its drafts are empty until the last. Every
    draft after the first takes one more forward of all requests together. A rejected draft costs nothing: the live
    state holds only verified text, and drafts continue from it in a separate slot. When memory is short, a request gets
    fewer drafts or none; it never fails for lack of memory.

    Args:
        model: Any MambaModel that `build_engine` accepts, with the same vocabulary as the engine's model.
        config: Settings of the draft model's own cache; None for the defaults. `block_size_tokens` may differ from the
            engine's. Each request with more than one draft token uses one more state. With `num_cuda_graphs`, forwards
            are captured when the drafter is built; without, the host takes many times as long to launch one as a GPU to
            compute it. `num_speculative_tokens` and `decode_checkpoints` are ignored.

    Raises:
        ValueError: If the model cannot be served, has experts that expert-parallel ranks share, or the settings do not
            fit it.
        TypeError: If it is not a MambaModel.
    """

    def __init__(self, model: Any, config: CacheConfig | None = None) -> None:
        self._ranks = ranks = ranks_of_process()
        # One state more than the live one: the state after the newest draft.
        config = replace(config or CacheConfig(), num_speculative_tokens=1, draft_states="window")
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
        """Width of the distributions, padding included."""
        return self._context.shape.vocab_size

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Estimate one forward for each draft; each is read back before the next is launched."""
        return num_drafts * (self._time.seconds(num_requests, 0) + self._time.device.drafts_s)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order.

        A draft is empty while the request's prompt is being prefilled, when there is no room for it, and when the text
        has not changed since the last call.
        """
        try:
            return self._propose(requests)
        except BaseException:
            self._held.abort_round({request.running.request_id for request in requests})
            raise

    def forget(self, request_id: int) -> None:
        """Free what is held for a request, if it is known. What was published stays findable."""
        self._held.forget(request_id)

    def warmup(self) -> None:
        """Compile all kernels that drafting launches; a draft model only prefills."""
        self._compile_ahead()
        warm_up_prefill(self._model, self._context.runner)

    def flush(self, weights_version: str | None = None) -> None:
        """Drop the draft model's cache, because its weights changed.

        If the weights have moved, CUDA graphs are dropped, and captured again before the engine's next step.
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
        self.wants_graphs = False  # they are captured once, or cannot be
        runner, config = self._context.runner, self._context.cache_config
        shape, prepare = self._context.shape, self._compile_ahead
        shapes = draft_shapes(config, runner.memory.step_buffers.limits, shape.most_launched)
        runner.adopt_graphs(capture_graphs(self._model, runner, config, shape, shapes, prepare, DrawPurpose.DRAFT))

    def snapshot(self) -> CacheSnapshot:
        """Return counters, and the use of slots and blocks.

        Prefill tokens count verified tokens, decode tokens the drafts that were fed to the model.
        """
        return self._context.snapshot()

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless requests, blocks and slots agree."""
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
        """Compute the scheduled requests and sample the next token of each; its only host sync reads them back."""
        runner, graphs = self._context.runner, self._context.graphs
        graph = None if graphs is None else graphs.fitting(requests)
        if graph is None:
            step = runner.begin(runner.lay_out(requests, purpose=DrawPurpose.DRAFT))
            output = self._model.compute_step()
        else:
            step = runner.begin(Step.of_graph(graph, requests, ()))
            output = graph.forward()
        settings, num_requests = step.batch.logits, len(requests)  # padding follows
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
    """Raise `ValueError` if expert-parallel ranks would share the draft model's experts; all ranks call it.

    Each layer of experts would need all ranks at once, but each rank drafts when its own requests need it.
    """
    if num_expert_ranks() > 1 and any(ranks.gather(shape.has_experts)):
        raise ValueError(
            f"the draft model has experts, and {num_expert_ranks()} expert-parallel ranks, which draft at different "
            "times, cannot share them: take a draft model without experts, or tensor-parallel ranks"
        )


@dataclass(frozen=True, slots=True)
class _SampledTokens:
    """The next tokens of a forward's requests, and the distributions they were sampled from; None if all are greedy."""

    tokens: list[int]
    probabilities: Tensor | None  # [requests, vocab] float64


@dataclass(slots=True)
class _UnfinishedDraft:
    """A draft that grows by one token per forward, up to its limit."""

    held: HeldRequest
    limit: int
    tokens: list[int] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)

    def append(self, sampled: _SampledTokens, index: int) -> None:
        """Append the token of one request of a forward."""
        self.tokens.append(sampled.tokens[index])
        if sampled.probabilities is not None and not self.held.running.spec.sampling.is_greedy:
            self.distributions.append(sampled.probabilities[index])

    def finished(self) -> Draft:
        """Return the draft."""
        return Draft(tuple(self.tokens), torch.stack(self.distributions) if self.distributions else None)
