"""Before the first request arrives, compile all kernels that steps launch, without changing other state.

Triton compiles one variant per combination of dtypes, strides, constants and pointer alignments. Warmup therefore runs
real steps with padding requests, which every op skips: the forward pass, verification and the align copy, over the
context's pools and step buffers. Before warmup, `compile_ahead` makes the same calls without launching Triton kernels,
and compiles the recorded variants in parallel threads.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ..kernels.compilation import compiling_ahead
from ..kernels.kernel_launches import is_computed_in_fp32
from ..kernels.progress import progress
from ..policy.identifiers import BlockId
from ..policy.requests import RunningRequest
from ..recurrences.batches import PAD_SLOT
from ..recurrences.interface import LiveState
from .buffers import StepLimits
from .logits import Draws
from .model import StepModel
from .runner import StepRunner
from .shapes import decode_padding_request, prefill_padding_request
from .verify import copy_reached_boundaries, verify_step

_LOG = logging.getLogger(__name__)
_COMPILES = "Triton compiles the kernels for this model, once per machine"
_LAUNCHES = "Each kernel of this model is launched once, and compiled if it has not been"
_MOST_RESIDUES = 8
"""Number of offsets of a 2-byte element within 16 bytes, the pointer alignment for which Triton compiles variants."""

Rows = list[RunningRequest]


def compile_ahead(
    model: StepModel, runner: StepRunner, rehearse_steps: Callable[[StepModel, StepRunner], None] | None = None
) -> None:
    """Compile most of the steps' kernels in parallel threads, without launching them.

    Call it only between steps. It does nothing on a CPU, or in float64, for which some ops have no kernels.

    Args:
        rehearse_steps: Function that runs every kind of step with padding requests; the default is `rehearse`.
    """
    if not _may_compile_ahead(runner):
        return
    try:
        with progress(_COMPILES), compiling_ahead(runner.memory.state_pool.device):
            (rehearse_steps or rehearse)(model, runner)
    except Exception as error:  # steps compile missing kernels themselves
        _LOG.warning("kernels are compiled one after another, because a dry run without launches raised %r", error)


def warm_up(model: StepModel, runner: StepRunner) -> None:
    """Launch each kernel of a model and its drafter once, to compile those still missing; call it between steps.

    Also capture the drafter's CUDA graphs if it has none.
    """
    if runner.memory.state_pool.device.type == "cuda":
        with progress(_LAUNCHES):
            rehearse(model, runner)
            runner.planner.warmup()
            runner.planner.capture_if_wanted(runner.memory.below.drain)


def warm_up_prefill(model: StepModel, runner: StepRunner) -> None:
    """Launch each kernel of steps that contain only prefill requests once; call it between steps."""
    if runner.memory.state_pool.device.type == "cuda":
        rehearse_prefill(model, runner)


def _may_compile_ahead(runner: StepRunner) -> bool:
    pool = runner.memory.state_pool
    return pool.device.type == "cuda" and is_computed_in_fp32(*pool.tensors)


@torch.inference_mode()
def rehearse(model: StepModel, runner: StepRunner) -> None:
    """Run every kind of step with padding requests, on a CUDA device."""
    rehearse_prefill(model, runner)
    memory = runner.memory
    limits = memory.step_buffers.limits
    with runner.rehearsing():
        for requests in decode_steps(limits, memory.dummy_block):
            runner.show(runner.lay_out(requests))
            logits, step = model.compute_step(), runner.step.batch
            # Compilation does not depend on values, but NaN logits from padding would make the sampler fail.
            zeros = logits.new_zeros(step.logits.starts[-1], logits.shape[-1])
            for draws in Draws:
                outcome = verify_step(replace(step.logits, draws=draws), zeros, [])
            copy_reached_boundaries(step, outcome, memory)
            if zeros.dtype is not torch.float32:  # logits that requests change are converted to float32
                for draws in Draws:
                    verify_step(replace(step.logits, draws=draws), zeros.float(), [])
            torch.cuda.synchronize()  # before the next step overwrites the step buffers
    accepted = 2 if limits.max_drafts else 1
    memory.state_pool.drafts.resolve([LiveState(PAD_SLOT, PAD_SLOT, accepted, computed=1)])


@torch.inference_mode()
def rehearse_prefill(model: StepModel, runner: StepRunner) -> None:
    """Run every kind of step that contains only prefill requests, with padding requests, on a CUDA device."""
    memory = runner.memory
    with runner.rehearsing():
        for requests in prefill_steps(memory.step_buffers.limits, memory.geometry.block_size, memory.dummy_block):
            runner.show(runner.lay_out(requests))
            memory.restore_states(len(requests))
            model.compute_step()
            torch.cuda.synchronize()


def prefill_steps(limits: StepLimits, block_size: int, dummy_block: BlockId) -> Iterator[Rows]:
    """Yield batches of prefill requests that reach every kernel variant of the scan."""
    longest = min(limits.max_blocks * block_size, limits.max_length or limits.max_tokens)
    for num_requests in batch_sizes(min(limits.max_requests, limits.max_tokens)):  # larger batches run in graphs
        yield [prefill_padding_request(1, dummy_block) for _ in range(num_requests)]
    if limits.max_tokens > 1:
        yield [prefill_padding_request(2, dummy_block)]
    if limits.marks_real_tokens or limits.has_quantized_weights:
        # GEMM variants depend on the number of tokens, which may exceed the length of one request.
        for num_tokens in batch_sizes(min(limits.max_tokens, limits.max_requests * longest)):
            lengths = [longest] * (num_tokens // longest) + [num_tokens % longest] * (num_tokens % longest > 0)
            yield [prefill_padding_request(length, dummy_block) for length in lengths]


def batch_sizes(max_requests: int) -> list[int]:
    """Return batch sizes up to `max_requests` that cover every kernel variant."""
    return [*(1 << power for power in range((max_requests - 1).bit_length())), max_requests]


def decode_steps(limits: StepLimits, dummy_block: BlockId) -> Iterator[Rows]:
    """Yield decode requests with and without drafts, alone and followed by a prefill request."""
    widest = min(1 + limits.max_drafts, limits.max_tokens)
    for width in range(1, widest + 1):  # replay kernels are specialized for the width
        yield [decode_padding_request(width, dummy_block)]
    if limits.has_quantized_weights or limits.has_fp8_kv:  # whose kernels depend on the number of requests
        for num_requests in batch_sizes(min(limits.max_requests, limits.max_tokens // widest))[1:]:
            yield [decode_padding_request(widest, dummy_block) for _ in range(num_requests)]
    most_tokens = min(_MOST_RESIDUES - 1, (limits.max_requests - 1) * widest, limits.max_tokens - 1)
    for num_tokens in range(1, most_tokens + 1):
        widths = [widest] * (num_tokens // widest) + [num_tokens % widest] * (num_tokens % widest > 0)
        decoding = [decode_padding_request(width, dummy_block) for width in widths]
        yield [*decoding, prefill_padding_request(1, dummy_block)]
