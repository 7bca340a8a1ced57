"""Steps as CUDA graphs: the forward, then verification and align copies, over buffers at fixed addresses.

There is a graph of what follows the forward for each way to draw tokens. Where a row changes its logits, or a draft was
drawn at random, it runs without a graph.

A graph is captured over padding: rows that own no slot, whose KV goes to the dummy block. So capturing touches no
cached state. Before a replay the step's rows replace padding rows; every op skips those that remain, as in warmup. A
graph is valid only for the memory that it was captured over: both are dropped together. It also reads the weights at
the addresses that they had at capture, so graphs record these.

Of the communication between a model's ranks, the layers' collectives and the outcome of verification are captured,
because they stay on the stream; transfers between pipeline stages run before and after a replay. All ranks capture the
same shapes in the same order, and compute each once before, which opens their connections.
"""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from ..config import CacheConfig
from ..errors import CacheIntegrityError
from ..kernels.attention.attention_rows import AttentionRows
from ..kernels.attention.interface import attention_after
from ..policy.requests import RunningRequest, num_decoding
from ..state.model_shape import HybridModelShape
from .batch import StepBatch, send_padded_step, view_step
from .captured_step import Capture
from .decode_steps import DecodeStep, LatestStep, SentStep, send_again, send_next
from .launched_step import LaunchedStep
from .logits import Draws, StepLogits, any_changed, any_masked, logits_starts
from .memory import CacheMemory
from .model import StepModel
from .recorder import CudaRecorder, Recorder, without_collections
from .runner import StepRunner
from .shapes import StepShape, decode_shapes, prefill_shapes, smallest_holding
from .step import Step, any_drawn
from .verify import copy_reached_boundaries, outcome_on_all_ranks, verify_step
from .weight_places import WeightPlaces

_LOG = logging.getLogger(__name__)


class StepGraph:
    """The steps of one shape.

    Args:
        model: Reads the steps that the runner shows.
        recorder: Captures one computation after another.
        longest: The most tokens of a request.
    """

    can_verify = True

    def __init__(
        self,
        model: StepModel,
        runner: StepRunner,
        shape: StepShape,
        recorder: Recorder,
        latest: LatestStep,
        longest: int,
    ) -> None:
        self.shape = shape
        self._model = model
        self._memory = runner.memory
        buffers, geometry = self._memory.step_buffers, self._memory.geometry
        send_padded_step(shape.pad((), geometry.dummy_block), buffers, geometry, shape)
        padding, num_chunks = shape.fullest_rows(geometry.dummy_block), shape.num_chunks(geometry.ssm_chunk_size)
        self._views = view_step(padding, buffers, num_chunks)
        fullest = replace(self._views.attention, query_lens=shape.most_queries, kv_lens=(longest,) * shape.num_rows)
        # Other stages have other layers, and ranks that share experts other prompts: they would wait for one another.
        is_alone = runner.ranks.num_stages == 1 and not runner.sharing.is_shared
        self._attention = self._memory.attention.capture(fullest, may_be_left_out=is_alone)
        self._unplanned: AttentionRows | None = None
        self._plans_inside = is_alone and shape.num_prefill_tokens > 0 and self._attention.is_planned
        self._latest = latest

        def forward() -> tuple[Tensor, ...]:
            with runner.rehearsing():
                self._views = view_step(padding, buffers, num_chunks)
                attend = self._attention.begin()
                step = Step(self._views, attention_after(recorder.split, attend) if self._plans_inside else attend)
                runner.show(step)
                logits = model.compute_part()
                return logits, step.wanted_outputs, *_computed_views(self._views.logits)

        found, self._replay_forward = recorder.record(forward, self._plan_attention)
        self.logits, self.wanted_outputs, *computed = found
        self._results = replace(self._views, logits=_with_computed(self._views.logits, *computed))
        self.outcome = self.logits.new_empty(shape.num_rows, 1 + shape.width, dtype=torch.int64)

        def verify(draws: Draws) -> tuple[Tensor, ...]:
            step = Step(self._views)
            rows = replace(self._views.logits, draws=draws)
            outcome = outcome_on_all_ranks(
                runner.ranks, rows, lambda: verify_step(rows, runner.wanted_logits(step, self.logits), [])
            )
            copy_reached_boundaries(self._views, outcome, self._memory)
            self.outcome.copy_(outcome)
            return ()

        self._replay_verify = {draws: recorder.record(partial(verify, draws))[1] for draws in Draws}

    def reads_blocks_of(self, rows: Sequence[RunningRequest]) -> bool:
        """Return whether its attention can read the KV blocks of a step's prompts."""
        last = self._attention.last_block
        return last is None or all(max(row.block_ids) <= last for row in rows[num_decoding(rows) :])

    def lay_out(self, rows: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        """Send the rows of a step that the shape holds; return it as its readers see it."""
        buffers, geometry, before = self._memory.step_buffers, self._memory.geometry, self._latest.of(self)
        if before is not None and not draws_ratios and before.step.continues(rows, buffers, geometry.block_size):
            return self._note_next(before, send_again(before.step, rows, buffers, self.shape.num_rows))
        padded = self.shape.pad(rows, geometry.dummy_block)
        send_padded_step(padded, buffers, geometry, self.shape, draws_ratios=draws_ratios)
        batch, step = self._batch_of(rows, padded), DecodeStep.sent(rows, buffers)
        self._latest.note(None if step is None else SentStep(self, step, batch))
        self._unplanned = batch.attention
        return batch

    def _plan_attention(self) -> None:
        """Plan the step that was laid out last, once: before its forward, or within, where `_plans_inside`."""
        if self._unplanned is not None:
            self._attention.plan_again(self._unplanned)
            self._unplanned = None

    def can_launch_next(self, rows: Sequence[RunningRequest], tokens: Sequence[int] | None) -> bool:
        """Return whether the step after the one laid out last may be launched; see `CapturedStep`."""
        memory, before = self._memory, self._latest.of(self)
        return before is not None and before.step.can_launch_next(
            rows, tokens, memory.step_buffers, memory.geometry.block_size
        )

    def launch_next(self, rows: Sequence[RunningRequest]) -> LaunchedStep:
        """Launch the step after the one laid out last; see `CapturedStep`."""
        before = self._latest.of(self)
        if before is None or before.step.ends is None:
            raise CacheIntegrityError("the next step depends on more than this step's tokens; ask can_launch_next()")
        batch = self._note_next(before, send_next(before.step, self._memory.step_buffers, self.shape.num_rows))
        self._memory.step_buffers.feed(self.outcome[: len(rows), 1])  # decode rows come first
        self.forward()
        is_verified = not any_masked(rows)
        if is_verified:
            self.verify(before.step.draws)
        return LaunchedStep(self, batch, before.step.ends, is_verified=is_verified)

    def _note_next(self, before: SentStep, step: DecodeStep) -> StepBatch:
        """Note and return a step that continues the one before in its KV blocks; its attention plan stays valid."""
        kv_lens = tuple(self._memory.step_buffers.host("kv_lengths")[: self.shape.num_rows].tolist())
        batch = replace(before.batch, attention=replace(before.batch.attention, kv_lens=kv_lens))
        self._latest.note(SentStep(self, step, batch))
        return batch

    def _batch_of(self, rows: Sequence[RunningRequest], padded: Sequence[RunningRequest]) -> StepBatch:
        """Return the rows of a step that was sent with padding, as its readers see them."""
        results, shape = self._results, self.shape
        num_decode = num_decoding(rows)
        places = shape.places(rows)
        starts = logits_starts(padded)
        return replace(
            results,
            rows=tuple(rows),
            request_ids=tuple(row.request_id for row in rows),
            places=places,
            num_tokens=sum(row.scheduled for row in rows),
            num_decode_rows=num_decode,
            num_decode_tokens=sum(row.scheduled for row in rows[:num_decode]),
            attention=replace(
                results.attention,
                query_lens=tuple(row.scheduled for row in padded),
                kv_lens=tuple(row.computed + row.scheduled for row in padded),
            ),
            logits=replace(
                results.logits,
                starts=(*(starts[place] for place in places), starts[-1]),
                draws=Draws.of(rows),
                any_changed=any_changed(rows),
            ),
        )

    def forward(self) -> Tensor:
        """Compute the logits of the step that was laid out last; those of padding are meaningless."""
        if not self._plans_inside:
            self._plan_attention()
        self._model.receive(self.shape.num_tokens)
        self._replay_forward()
        self._model.send(self.logits)
        return self.logits

    def verify(self, draws: Draws) -> Tensor:
        """After `forward`, draw tokens, verify, and copy the states of reached boundaries."""
        self._replay_verify[draws]()
        return self.outcome


def _computed_views(logits: StepLogits) -> tuple[Tensor, ...]:
    """Return the tensors that a step's views compute from its buffers and that are read after the forward."""
    return logits.temperature, logits.top_k, logits.top_p, logits.verify.draft_ids


def _with_computed(
    logits: StepLogits, temperature: Tensor, top_k: Tensor, top_p: Tensor, draft_ids: Tensor
) -> StepLogits:
    verify = replace(logits.verify, draft_ids=draft_ids)
    return replace(logits, temperature=temperature, top_k=top_k, top_p=top_p, verify=verify)


class StepGraphs:
    """The graphs of one memory, by shape.

    Args:
        weights: Addresses at which the graphs read the weights.
        tables: What they read of the model besides its weights, kept from being freed.
    """

    def __init__(
        self, graphs: Sequence[StepGraph], capture: Capture, weights: WeightPlaces, tables: Sequence[Tensor]
    ) -> None:
        self._graphs = {graph.shape: graph for graph in graphs}
        self._tables = {id(table): table for table in tables}
        self.capture = capture
        self.weights = weights

    @property
    def shapes(self) -> Collection[StepShape]:
        """The shapes of the graphs."""
        return self._graphs.keys()

    def hold(self, step: StepShape) -> bool:
        """Return whether there is a graph for every step that another shape holds."""
        return any(shape.holds(step) for shape in self._graphs)

    def launch(self, rows: Sequence[RunningRequest], draft_distributions: Sequence[Tensor | None]) -> LaunchedStep:
        """Send a step that a graph holds, and launch its forward; see `GraphsByShape`."""
        graph = self.fitting(rows)
        if graph is None:
            raise CacheIntegrityError("no graph holds the rows of a step that is to be launched; ask hold()")
        batch = graph.lay_out(rows, draws_ratios=any_drawn(draft_distributions))
        graph.forward()
        return LaunchedStep(graph, batch, None, is_verified=False, draft_distributions=draft_distributions)

    def fitting(self, rows: Sequence[RunningRequest], shape: StepShape | None = None) -> StepGraph | None:
        """Return the graph of a shape, by default the smallest that holds the rows of a step; None if there is none."""
        if any(row.spec.log_probs.wanted for row in rows[num_decoding(rows) :]):
            return None  # the logits of a prompt's tokens are elsewhere in a padded step
        found = shape or smallest_holding(StepShape.of(rows), self._graphs)
        graph = self._graphs.get(found) if found else None
        return graph if graph and graph.reads_blocks_of(rows) else None


def reason_without_graphs(shape: HybridModelShape, memory: CacheMemory) -> str | None:
    """Return why the steps of a model cannot be captured, None if they can."""
    if shape.waits_for_experts:
        return "the host waits for what experts the tokens choose, in Megatron's layer"
    return device_reason(memory)


def device_reason(memory: CacheMemory) -> str | None:
    """Return why the device cannot capture, None if it can."""
    return None if memory.state_pool.ssm.is_cuda else "the model runs on a CPU"


@torch.inference_mode()
def capture_graphs(
    model: StepModel, runner: StepRunner, config: CacheConfig, shape: HybridModelShape
) -> StepGraphs | None:
    """Capture steps, between two steps; return None if nothing is to be or can be captured."""
    count = config.num_cuda_graphs
    reasons = runner.ranks.gather(reason_without_graphs(shape, runner.memory) if count else None)
    reason = next((found for found in reasons if found is not None), None)  # a graph waits for the other ranks' graphs
    if count and runner.peers.greatest([reason is not None])[0]:
        reason = reason or "a rank that shares experts with this one cannot capture"
    if reason is not None:
        _LOG.warning("num_cuda_graphs is %d, but steps run without CUDA graphs: %s", count, reason)
    if not count or reason is not None:
        return None
    began = time.perf_counter()
    limits = runner.memory.step_buffers.limits
    shapes = decode_shapes(count, config.max_requests, limits.max_drafts, limits.max_tokens)
    shapes += prefill_shapes(config.cuda_graph_prefill_tokens, config.max_requests, limits.max_tokens)
    recorder = CudaRecorder()
    # The largest first: smaller ones fit into the memory that it leaves in the pool.
    largest_first = sorted(shapes, key=lambda step_shape: -step_shape.num_tokens)
    with (
        without_collections(),
        model.tables_read() as tables,
        tqdm(largest_first, desc="capturing", unit="graph", leave=False, disable=None) as progress,
    ):
        latest = LatestStep()
        longest = config.max_sequence_length
        graphs = [StepGraph(model, runner, step_shape, recorder, latest, longest) for step_shape in progress]
    torch.cuda.synchronize()
    capture = Capture(len(graphs), time.perf_counter() - began, recorder.num_bytes())
    return StepGraphs(graphs, capture, model.weight_places(), tables)
