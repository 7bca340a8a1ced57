"""Compile all kernels of a model's steps before the first request, without changing anything else.

What Triton compiles depends on dtypes, strides, constants and the alignment of every pointer, so warmup makes the calls
of real steps: the model's forward, verification and the align copy, over the context's own pools and step buffers. Its
requests are padding, which every op skips. Before that, `compile_ahead` makes the same calls without launching Triton's
kernels, and threads compile them at once.
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
"""The number of offsets of 2-byte elements modulo 16 bytes, the alignment by which compiled kernels differ."""

Rows = list[RunningRequest]


def compile_ahead(
    model: StepModel, runner: StepRunner, rehearse_steps: Callable[[StepModel, StepRunner], None] | None = None
) -> None:
    """Compile most kernels of a model's steps in parallel, without launching them.

    Call it between steps only. On a CPU, and in float64, which some ops compute without kernels, it does nothing.

    Args:
        rehearse_steps: Runs all kinds of steps; None: `rehearse`.
    """
    if not _may_compile_ahead(runner):
        return
    try:
        with progress(_COMPILES), compiling_ahead(runner.memory.state_pool.device):
            (rehearse_steps or rehearse)(model, runner)
    except Exception as error:  # steps also work without compiling ahead
        _LOG.warning("kernels are compiled one after another, because a dry run without launches raised %r", error)


def warm_up(model: StepModel, runner: StepRunner) -> None:
    """Launch all kernels of a model and its drafter once on a GPU, to compile the rest; call it between steps."""
    if runner.memory.state_pool.device.type == "cuda":
        with progress(_LAUNCHES):
            rehearse(model, runner)
            runner.planner.warmup()


def warm_up_prefill(model: StepModel, runner: StepRunner) -> None:
    """Run `warm_up` for steps without decode requests."""
    if runner.memory.state_pool.device.type == "cuda":
        rehearse_prefill(model, runner)


def _may_compile_ahead(runner: StepRunner) -> bool:
    pool = runner.memory.state_pool
    return pool.device.type == "cuda" and is_computed_in_fp32(*pool.tensors)


@torch.inference_mode()
def rehearse(model: StepModel, runner: StepRunner) -> None:
    """Run every kind of step with padding only, on any device."""
    rehearse_prefill(model, runner)
    memory = runner.memory
    limits = memory.step_buffers.limits
    with runner.rehearsing():
        for requests in decode_steps(limits, memory.dummy_block):
            runner.show(runner.lay_out(requests))
            logits, step = model.compute_step(), runner.step.batch
            # What is compiled does not depend on values, but a model's NaN would break the sampler.
            zeros = logits.new_zeros(step.logits.starts[-1], logits.shape[-1])
            for draws in Draws:
                outcome = verify_step(replace(step.logits, draws=draws), zeros, [])
            copy_reached_boundaries(step, outcome, memory)
            if zeros.dtype is not torch.float32:  # changed logits are float32
                for draws in Draws:
                    verify_step(replace(step.logits, draws=draws), zeros.float(), [])
            torch.cuda.synchronize()  # before the next step's integers overwrite this one's
    accepted = 2 if limits.max_drafts else 1
    memory.state_pool.drafts.resolve([LiveState(PAD_SLOT, PAD_SLOT, accepted, computed=1)])


@torch.inference_mode()
def rehearse_prefill(model: StepModel, runner: StepRunner) -> None:
    """Run every kind of prefill step with padding only, on any device."""
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
    for num_requests in batch_sizes(min(limits.max_requests, limits.max_tokens)):  # graphs cover larger batches
        yield [prefill_padding_request(1, dummy_block) for _ in range(num_requests)]
    if limits.max_tokens > 1:
        yield [prefill_padding_request(2, dummy_block)]
    if limits.marks_real_tokens:
        # The variants of expert GEMMs depend on the number of tokens; one request may be too short for all of them.
        for num_tokens in batch_sizes(min(limits.max_tokens, limits.max_requests * longest)):
            lengths = [longest] * (num_tokens // longest) + [num_tokens % longest] * (num_tokens % longest > 0)
            yield [prefill_padding_request(length, dummy_block) for length in lengths]


def batch_sizes(max_requests: int) -> list[int]:
    """Return batch sizes up to `max_requests` that cover every kernel variant."""
    return [*(1 << power for power in range((max_requests - 1).bit_length())), max_requests]


def decode_steps(limits: StepLimits, dummy_block: BlockId) -> Iterator[Rows]:
    """Yield decode requests with and without drafts, alone and followed by a prefill request."""
    widest = min(1 + limits.max_drafts, limits.max_tokens)
    for width in range(1, widest + 1):  # replay kernels depend on the width
        yield [decode_padding_request(width, dummy_block)]
    most_tokens = min(_MOST_RESIDUES - 1, (limits.max_requests - 1) * widest, limits.max_tokens - 1)
    for num_tokens in range(1, most_tokens + 1):
        widths = [widest] * (num_tokens // widest) + [num_tokens % widest] * (num_tokens % widest > 0)
        decoding = [decode_padding_request(width, dummy_block) for width in widths]
        yield [*decoding, prefill_padding_request(1, dummy_block)]
