"""The captured steps of one memory, by shape.

A graph is captured over padding requests, which own no slot and write KV to the dummy block, so capturing touches no
cached state. A graph is dropped together with the memory that it was captured over. It reads the weights at the
addresses that they had at capture, so graphs record these. The layers' collectives and the outcome of verification are
captured; transfers between pipeline stages run before and after a replay. All ranks capture the same shapes in the same
order.
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
    """CUDA graphs of one memory, by shape.

    Args:
        weights: Addresses at which the graphs read the weights.
        tables: What they read of the model besides its weights, kept from being freed.
        only_last_logits: As in `StepRunner`.
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
        """The shapes of the graphs."""
        return self._graphs.keys()

    def hold(self, step: StepShape) -> bool:
        """Return whether some graph fits every step that this shape fits."""
        return any(shape.holds(step) for shape in self._graphs)

    def launch(
        self, requests: Sequence[RunningRequest], draft_distributions: Sequence[Tensor | None]
    ) -> OverlappedStep:
        """Send a step to its graph and launch its forward pass; see `GraphsByShape`."""
        graph = self.fitting(requests)
        if graph is None:
            raise CacheIntegrityError("no graph fits the requests of the step to launch; call hold() first")
        batch = graph.lay_out(requests, draws_ratios=any_sampled(draft_distributions))
        graph.forward()
        return OverlappedStep(graph, batch, None, OverlapState.FORWARD, draft_distributions)

    def fitting(self, requests: Sequence[RunningRequest], shape: StepShape | None = None) -> StepGraph | None:
        """Return the graph of `shape`, or the smallest that fits the requests; None if there is none."""
        prompts = requests[num_decoding(requests) :]
        if any(request.scores_prompt for request in prompts) or (any_scored(prompts) and not self._only_last_logits):
            return None  # padding would move the hidden states and logits of prompt tokens
        found = shape or smallest_holding(StepShape.of(requests), self._graphs)
        graph = self._graphs.get(found) if found else None
        return graph if graph and graph.reads_blocks_of(requests) else None


def reason_to_capture_again(graphs: GraphsByShape | None, model: StepModel, ranks: Ranks) -> str | None:
    """Return which weight has moved from its captured address, on the first rank where one has."""
    change = None if graphs is None else graphs.weights.first_change(model.weight_addresses())
    changes = enumerate(ranks.gather(change))
    return next((f"on rank {rank} of the model, {found}" for rank, found in changes if found is not None), None)


def reason_without_graphs(shape: HybridModelShape, memory: CacheMemory) -> str | None:
    """Return why steps of this model cannot be captured; None if they can."""
    if shape.waits_for_experts:
        return "the host waits for the routing of tokens in Megatron's expert layer"
    return device_reason(memory)


def device_reason(memory: CacheMemory) -> str | None:
    """Return why this device cannot capture graphs; None if it can."""
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
    """Capture the given shapes between two steps; return None if capturing is disabled or impossible.

    Args:
        prepare: Called before steps are captured.
        purpose: The purpose of the sampled tokens; for drafts, only greedy sampling is captured after the forward.
    """
    count = config.num_cuda_graphs
    reasons = runner.ranks.gather(reason_without_graphs(shape, runner.memory) if count else None)
    reason = next((found for found in reasons if found is not None), None)  # ranks capture together
    if count and runner.peers.greatest([reason is not None])[0]:
        reason = reason or "a rank that shares experts with this one cannot capture"
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
