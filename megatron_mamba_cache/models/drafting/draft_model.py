"""A drafter that runs a smaller model and caches its states as an engine would."""

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
from .draft_rows import DraftRow, DraftRows

_LOG = logging.getLogger(__name__)


class DraftModelDrafter:
    """Draft what a draft model would generate: its best tokens for greedy requests, else sampled as the request is.

    It has its own KV blocks, state slots and prefix cache, so that a shared prefix is prefilled once. A call computes
    each request's new text in one forward; a long prompt takes several calls, and its drafts are empty until the last.
    Every draft after the first takes one more forward of all requests together. A rejected draft costs nothing: the
    live state holds only verified text, and drafts continue from it in a separate slot. The drafted tokens are read
    back once per forward.

    When memory is short, a request gets fewer drafts or none; it never fails for lack of memory.

    Args:
        model: Any MambaModel that `build_engine` accepts, with the same vocabulary as the engine's model.
        config: Settings of the draft model's own cache; None takes the defaults. `block_size_tokens` need not be the
            engine's. Each request with more than one draft token uses one more state.
            With `num_cuda_graphs`, forwards are captured when the drafter is built; without, the host takes many times
            as long to launch one as a GPU to compute it. `num_speculative_tokens` and `decode_checkpoints` are ignored.

    Raises:
        ValueError: If the model cannot be served, has experts that expert-parallel ranks share, or the settings do not
            fit it.
        TypeError: If it is not a MambaModel.
    """

    def __init__(self, model: Any, config: CacheConfig | None = None) -> None:
        self._ranks = ranks = ranks_of_process()
        # One state beside the live one: the state after the newest draft.
        config = replace(config or CacheConfig(), num_speculative_tokens=1, draft_states="window")
        shape = check_served(model, ranks, config.max_sequence_length)
        check_draft_experts(shape, ranks)
        self._context = MambaCacheContext(config, shape, ranks=ranks)
        self._time = step_time_of(model, shape, self._context.cache_config, ranks)
        self._counters = self._context.counters
        self._model = wrap_model(model, self._context)
        self._rows = DraftRows(self._context)
        self._has_compiled = False
        self._wants_graphs = False
        self.capture()

    @property
    def vocab_size(self) -> int:
        """Width of the distributions, padding included."""
        return self._context.shape.vocab_size

    def draft_seconds(self, num_rows: int, num_drafts: int) -> float:
        """See `TakesTime`: a forward a draft, each of which is read before the next is launched."""
        return num_drafts * (self._time.seconds(num_rows, 0) + self._time.device.drafts_s)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order; see `Drafter`.

        A draft is empty while the request's prompt is being prefilled, when there is no room for it, and when the text
        has not changed since the last call.
        """
        try:
            return self._propose(requests)
        except BaseException:
            self._rows.abort_round({request.row.request_id for request in requests})
            raise

    def forget(self, request_id: int) -> None:
        """Free what is held for a request; do nothing if it is unknown. What was published stays findable."""
        self._rows.forget(request_id)

    def warmup(self) -> None:
        """Compile all kernels that drafting launches; to a draft model every row is a prompt."""
        self._compile_ahead()
        warm_up_prefill(self._model, self._context.runner)

    def flush(self, weights_version: str | None = None) -> None:
        """Drop everything the draft model has cached, because its weights changed; see `MambaCacheContext.flush`.

        If they have moved, CUDA graphs are dropped, and captured again before the engine's next step.
        """
        self._rows.drop_all()
        self._context.flush(weights_version)
        self.check_weights()

    def check_weights(self) -> None:
        reason = reason_to_capture_again(self._context.graphs, self._model, self._ranks)
        if reason is not None:
            _LOG.warning("a draft model's CUDA graphs are captured again: %s", reason)
            self.drop_graphs()

    def drop_graphs(self) -> None:
        runner = self._context.runner
        self._wants_graphs = self._wants_graphs or runner.graphs is not None
        runner.drop_graphs()

    @property
    def wants_graphs(self) -> bool:
        return self._wants_graphs

    def capture(self) -> None:
        self._wants_graphs = False  # they are captured once, or cannot be
        runner, config = self._context.runner, self._context.cache_config
        shape, prepare = self._context.shape, self._compile_ahead
        shapes = draft_shapes(config, runner.memory.step_buffers.limits, shape.most_launched)
        runner.adopt_graphs(capture_graphs(self._model, runner, config, shape, shapes, prepare, DrawPurpose.DRAFT))

    def snapshot(self) -> CacheSnapshot:
        """Return the draft model's counters and the use of its slots and blocks.

        Prefill tokens count verified tokens, decode tokens the drafts that were fed to the model.
        """
        return self._context.snapshot()

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless rows, blocks and slots agree."""
        self._rows.check_integrity()

    def _propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        served = self._rows.schedule(requests)
        if not served:
            return [Draft()] * len(requests)
        drawn = self._draw([held.row for held in served])
        self._rows.settle(served)
        limits = {request.row.request_id: request.num_tokens for request in requests}
        started = {}
        for index, held in enumerate(served):
            row = held.row
            if row.computed == row.length:
                limit = self._rows.room_for_drafts(held, limits[row.request_id])
                started[row.request_id] = unfinished = _UnfinishedDraft(held, limit)
                unfinished.append(drawn, index)
        while growing := [draft for draft in started.values() if len(draft.tokens) < draft.limit]:
            drawn = self._draw([draft.held.branch(draft.tokens) for draft in growing])
            self._counters.decode_tokens_computed += len(growing)
            for index, draft in enumerate(growing):
                draft.append(drawn, index)
        self._rows.end_round(served)
        ids = [request.row.request_id for request in requests]
        return [started[request_id].finished() if request_id in started else Draft() for request_id in ids]

    def _draw(self, rows: Sequence[RunningRequest]) -> "_DrawnTokens":
        """Compute scheduled rows and draw the token after each; reading them back is the forward's only host sync."""
        runner, graphs = self._context.runner, self._context.graphs
        graph = None if graphs is None else graphs.fitting(rows)
        if graph is None:
            step = runner.begin(runner.lay_out(rows, purpose=DrawPurpose.DRAFT))
            output = self._model.compute_step()
        else:
            step = runner.begin(Step.of_graph(graph, rows, ()))
            output = graph.forward()
        settings, num_rows = step.batch.logits, len(rows)  # padding comes behind
        if settings.draws is Draws.BEST and graph is not None:
            return _DrawnTokens(graph.verify(Draws.BEST)[:num_rows, 1].tolist(), None)
        logits = runner.logits_on_all_ranks(step, output)[:num_rows]
        if settings.draws is Draws.BEST:
            return _DrawnTokens(greedy_tokens(logits).tolist(), None)
        probabilities = token_probabilities(settings.sampling(logits))
        return _DrawnTokens(sample_weighted(probabilities, settings.uniforms[:num_rows]).tolist(), probabilities)

    def _compile_ahead(self) -> None:
        if not self._has_compiled:
            self._has_compiled = True
            compile_ahead(self._model, self._context.runner, rehearse_prefill)


def check_draft_experts(shape: HybridModelShape, ranks: Ranks) -> None:
    """Raise `ValueError` if expert-parallel ranks would share a draft model's experts; all ranks of the model call it.

    In each layer of experts all of them would have to meet, and each drafts when its own requests need it.
    """
    if num_expert_ranks() > 1 and any(ranks.gather(shape.has_experts)):
        raise ValueError(
            f"the draft model has experts, and {num_expert_ranks()} expert-parallel ranks, which draft at different "
            "times, cannot share them: take a draft model without experts, or tensor-parallel ranks"
        )


@dataclass(frozen=True, slots=True)
class _DrawnTokens:
    """The tokens that follow the rows of a forward, and the distributions they were drawn from; None: all greedy."""

    tokens: list[int]
    probabilities: Tensor | None  # [rows, vocab] float64


@dataclass(slots=True)
class _UnfinishedDraft:
    """A draft that grows by one token per forward, up to its limit."""

    held: DraftRow
    limit: int
    tokens: list[int] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)

    def append(self, drawn: _DrawnTokens, index: int) -> None:
        """Append the token of one row of a forward."""
        self.tokens.append(drawn.tokens[index])
        if drawn.probabilities is not None and not self.held.row.spec.sampling.is_greedy:
            self.distributions.append(drawn.probabilities[index])

    def finished(self) -> Draft:
        """Return the draft."""
        return Draft(tuple(self.tokens), torch.stack(self.distributions) if self.distributions else None)
