"""Padding steps that expert-parallel ranks without requests run to take part in the collectives."""

import torch

from ..policy.scheduler import QueueState
from .model import StepModel
from .runner import StepRunner
from .shapes import StepShape, decode_padding_request
from .shared_steps import NO_REQUESTS, Part, SharedSteps


@torch.inference_mode()
def take_part(model: StepModel, runner: StepRunner) -> None:
    """Compute padding in a shared step, and in the next step if other ranks may have launched it early.

    Called on an expert-parallel rank without requests.
    """
    sharing = runner.sharing
    if not isinstance(sharing, SharedSteps):
        _compute_padding(StepShape(1), model, runner)
        torch.cuda.synchronize()  # before the next step overwrites the step buffers
        return
    shape = sharing.next_shape()
    _launch_padding(shape, model, runner, sharing)
    owes_next = sharing.agree_on_next(NO_REQUESTS, runner.queue, wants_overlap=False)
    torch.cuda.synchronize()
    if owes_next:
        _compute_padding(shape, model, runner)
        sharing.padding_is_launched = True


@torch.inference_mode()
def complete_failed_step(model: StepModel, runner: StepRunner) -> None:
    """Finish this rank's part of a failed step with padding, after its requests were dropped."""
    sharing = runner.sharing
    if not isinstance(sharing, SharedSteps):
        return
    if sharing.part is Part.BEGUN:
        take_part(model, runner)
    if sharing.part is Part.AGREED:
        with model.resuming_exchanges() as any_made:  # eagerly, because a graph replay would repeat all exchanges
            _launch_padding(sharing.present, model, runner, sharing, eagerly=any_made)
    if sharing.part is Part.LAUNCHED:
        sharing.agree_on_next(NO_REQUESTS, QueueState(), wants_overlap=False)


@torch.inference_mode()
def end_shared_steps(runner: StepRunner) -> None:
    """Compute the shared step that this rank owes the others, if any. Collective over the expert-parallel ranks."""
    sharing = runner.sharing
    if not isinstance(sharing, SharedSteps):
        return
    graphs, is_launched = runner.graphs, sharing.padding_is_launched or runner.overlapped_steps.launched is not None
    if sharing.is_owed and not is_launched and graphs is not None:
        graph = graphs.fitting((), sharing.present)
        assert graph is not None  # a step is owed only if it has a graph
        graph.lay_out((), draws_ratios=False)
        graph.forward()
    sharing.forget()
    runner.overlapped_steps.drop()
    torch.cuda.synchronize()


def _launch_padding(
    shape: StepShape, model: StepModel, runner: StepRunner, sharing: SharedSteps, *, eagerly: bool = False
) -> None:
    """Launch padding as this rank's part of the current step, unless that part was launched early."""
    if runner.overlapped_steps.take() is None and not sharing.padding_is_launched:
        runner.planner.together.take_part()
        _compute_padding(shape, model, runner, eagerly=eagerly)
    sharing.padding_is_launched = False
    sharing.note_launched()


def _compute_padding(shape: StepShape, model: StepModel, runner: StepRunner, *, eagerly: bool = False) -> None:
    graph = None if eagerly or runner.graphs is None else runner.graphs.fitting((), shape)
    if graph is not None:
        graph.lay_out((), draws_ratios=False)
        graph.forward()
        return
    with runner.rehearsing():
        runner.show(runner.lay_out([decode_padding_request(1, runner.memory.dummy_block)], shape=shape))
        model.compute_step()
