"""Capture CUDA graphs of steps over one cache memory, and find them by step shape.

Capture uses padding requests, which own no slot and write KV to the dummy block, so no cached state changes. A graph is
freed together with the cache memory that it was captured over. It reads weights at the addresses from capture time,
which are recorded to detect moved weights. The layers' collectives and the outcome of verification are captured;
transfers between pipeline stages run before and after a replay. All ranks capture the same shapes in the same order.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from ..config import CacheConfig
from ..errors import CacheIntegrityError
from ..policy.random_counter import DrawPurpose
from ..policy.requests import RunningRequest, num_decoding
from ..ranks.group import Ranks
from ..recurrences.model_shape import HybridModelShape
from .decode_steps import LatestStep
from .logits import any_scored
from .memory import CacheMemory
from .model import StepModel, WeightAddresses
from .overlapped_step import Capture, GraphsByShape, OverlappedStep, OverlapState
from .recorder import CudaRecorder, without_collections
from .runner import StepRunner
from .shapes import StepShape, smallest_holding
from .step import any_sampled
from .step_graph import OutputMemory, StepGraph

_LOG = logging.getLogger(__name__)


class StepGraphs:
    """CUDA graphs captured over one cache memory, keyed by step shape.

    Args:
        weights: Addresses at which the graphs read the weights.
        tables: Other model tensors that the graphs read; held here so that they are not freed.
        only_last_logits: True if the model returns logits only for the tokens in `StepBatch.logits`.
    """

    def __init__(
        self,
        graphs: Sequence[StepGraph],
        capture: Capture,
        weights: WeightAddresses,
        tables: Sequence[Tensor],
        *,
        only_last_logits: bool,
    ) -> None:
        self._graphs = {graph.shape: graph for graph in graphs}
        self._tables = {id(table): table for table in tables}
        self.capture = capture
        self.weights = weights
        self._only_last_logits = only_last_logits

    @property
    def shapes(self) -> Collection[StepShape]:
        """Shapes of the captured graphs."""
        return self._graphs.keys()

    @property
    def with_drafts(self) -> Collection[StepGraph]:
        """Graphs of steps with drafts."""
        return [graph for shape, graph in self._graphs.items() if shape.width > 1]

    def hold(self, step: StepShape) -> bool:
        """Return whether any graph can run a step of this shape, and so every smaller step."""
        return any(shape.holds(step) for shape in self._graphs)

    def launch(
        self, requests: Sequence[RunningRequest], draft_distributions: Sequence[Tensor | None]
    ) -> OverlappedStep:
        """Launch the forward pass of a step with the smallest graph that fits; see `GraphsByShape`."""
        graph = self.fitting(requests)
        if graph is None:
            raise CacheIntegrityError("no captured graph fits the requests to launch; check hold() before launch()")
        batch = graph.lay_out(requests, draws_ratios=any_sampled(draft_distributions))
        graph.forward()
        return OverlappedStep(graph, batch, None, OverlapState.FORWARD, draft_distributions)

    def fitting(self, requests: Sequence[RunningRequest], shape: StepShape | None = None) -> StepGraph | None:
        """Return the graph with this `shape`, or by default the smallest that fits the requests; None if none fits."""
        prompts = requests[num_decoding(requests) :]
        if any(request.scores_prompt for request in prompts) or (any_scored(prompts) and not self._only_last_logits):
            return None  # padding would shift the rows of prompt tokens in hidden states and logits
        found = shape or smallest_holding(StepShape.of(requests), self._graphs)
        graph = self._graphs.get(found) if found else None
        return graph if graph and graph.reads_blocks_of(requests) else None


def reason_to_capture_again(graphs: GraphsByShape | None, model: StepModel, ranks: Ranks) -> str | None:
    """Return a message that names a weight whose address changed since capture, and its rank; None if none did."""
    change = None if graphs is None else graphs.weights.first_change(model.weight_addresses())
    changes = enumerate(ranks.gather(change))
    return next((f"on rank {rank} of the model, {found}" for rank, found in changes if found is not None), None)


def reason_without_graphs(shape: HybridModelShape, memory: CacheMemory) -> str | None:
    """Return why steps of this model cannot be captured; None if they can."""
    if shape.waits_for_experts:
        return "the host waits for the routing of tokens in Megatron's expert layer"
    return device_reason(memory)


def device_reason(memory: CacheMemory) -> str | None:
    """Return why graphs cannot be captured on the device of this memory; None if they can."""
    return None if memory.state_pool.device.type == "cuda" else "the model runs on a CPU"


@torch.inference_mode()
def capture_graphs(
    model: StepModel,
    runner: StepRunner,
    config: CacheConfig,
    shape: HybridModelShape,
    shapes: Sequence[StepShape],
    prepare: Callable[[], None],
    purpose: DrawPurpose = DrawPurpose.SAMPLE,
) -> StepGraphs | None:
    """Capture graphs for the given shapes between two steps; return None if capture is disabled or impossible.

    Args:
        prepare: Function called once before the first capture.
        purpose: What the sampled tokens are used for. For drafting, only greedy sampling is captured.
    """
    count = config.num_cuda_graphs
    reasons = runner.ranks.gather(reason_without_graphs(shape, runner.memory) if count else None)
    reason = next((found for found in reasons if found is not None), None)  # all ranks capture or none
    if count and runner.peers.greatest([reason is not None])[0]:
        reason = reason or "another expert-parallel rank cannot capture graphs"
    if reason is not None:
        _LOG.warning("num_cuda_graphs is %d, but steps run without CUDA graphs: %s", count, reason)
    if not count or reason is not None:
        return None
    prepare()
    began = time.perf_counter()
    recorder, outputs = CudaRecorder(), OutputMemory(shapes)
    # Largest first, so that smaller graphs reuse its memory in the pool.
    largest_first = sorted(shapes, key=lambda step_shape: -step_shape.num_tokens)
    with (
        without_collections(),
        model.tables_read() as tables,
        tqdm(largest_first, desc="capturing", unit="graph", leave=False, disable=None) as progress,
    ):
        latest, longest = LatestStep(), config.max_sequence_length
        graphs = [
            StepGraph(model, runner, step_shape, recorder, outputs, latest, longest, purpose) for step_shape in progress
        ]
    torch.cuda.synchronize()
    capture = Capture(len(graphs), time.perf_counter() - began, recorder.num_bytes() + outputs.num_bytes)
    return StepGraphs(graphs, capture, model.weight_addresses(), tables, only_last_logits=runner.only_last_logits)
