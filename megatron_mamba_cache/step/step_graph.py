"""CUDA graphs for one step shape: the forward pass, then verification and copies of the states at block boundaries.

Verification and these copies have one graph per sampling method. They run without a graph if a request changes its
logits or a draft was sampled from a distribution. Before a replay, the step's requests replace padding requests in the
buffers; every op skips the remaining padding. If the host plans attention for prompts, the forward pass is split into
two graphs before the first attention layer, and the host plans while the first graph runs. It is not split with
pipeline stages or expert-parallel ranks, which would wait for one another.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..errors import CacheIntegrityError
from ..kernels.attention.interface import AttentionRows, attention_after
from ..policy.random_counter import DrawPurpose
from ..policy.requests import RunningRequest, num_decoding
from .batch import StepBatch, send_padded_step, view_step
from .decode_steps import DecodeStep, LatestStep, SentStep, send_again, send_next
from .followed_steps import can_follow, send_followed
from .logits import Draws, StepLogits, any_changed, any_masked, any_scored, end_tokens, logits_starts
from .model import StepModel
from .overlapped_step import OverlappedStep, OverlapState
from .recorder import Recorder
from .runner import StepRunner
from .shapes import StepShape
from .step import Step
from .verify import copy_reached_boundaries, outcome_on_all_ranks, verify_step


class OutputMemory:
    """Buffer for the output of the latest forward pass: logits, or hidden states on all stages but the last.

    All graphs share it, because logits for 259 tokens and 131,072 vocabulary entries take 65 MiB in bf16. The copy
    takes less than 0.1% of a step.

    Args:
        shapes: Shapes of all graphs, from which the buffer size is computed.
    """

    def __init__(self, shapes: Sequence[StepShape]) -> None:
        self._memory: Tensor | None = None
        self._most_logits = max((shape.num_logits for shape in shapes), default=0)
        self._most_tokens = max((shape.num_tokens for shape in shapes), default=0)

    def keep(self, output: Tensor, shape: StepShape) -> Tensor:
        """Copy the output of a forward pass into the buffer; return the copy, whose address never changes.

        Args:
            output: [..., width] one row per token, or only per token that needs logits. The first call must be for the
                shape with the most tokens.
        """
        if self._memory is None:
            has_all = output.numel() // output.shape[-1] != shape.num_logits
            most = self._most_tokens if has_all else self._most_logits
            self._memory = output.new_empty(most * output.shape[-1])
        kept = self._memory[: output.numel()].view(output.shape)
        return kept.copy_(output)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of device memory."""
        return 0 if self._memory is None else self._memory.nbytes


class StepGraph:
    """`CapturedStep` that replays the CUDA graphs for one step shape.

    Args:
        model: Model that computes the runner's current step.
        recorder: Recorder that captures the computations as CUDA graphs.
        outputs: Buffer that keeps the output of the forward pass until any graph runs its next forward pass.
        longest: Maximum number of tokens per request.
        purpose: What the sampled tokens are used for. For drafting, only greedy sampling is captured.
    """

    can_verify = True

    def __init__(
        self,
        model: StepModel,
        runner: StepRunner,
        shape: StepShape,
        recorder: Recorder,
        outputs: OutputMemory,
        latest: LatestStep,
        longest: int,
        purpose: DrawPurpose,
    ) -> None:
        self.shape = shape
        self._purpose = purpose
        self._longest = longest
        self._model = model
        self._memory = runner.memory
        buffers, geometry = self._memory.step_buffers, self._memory.geometry
        send_padded_step(shape.pad((), geometry.dummy_block), buffers, geometry, shape)
        padding, num_chunks = shape.fullest_requests(geometry.dummy_block), shape.num_chunks(geometry.grain)
        self._views = view_step(padding, buffers, num_chunks)
        fullest = replace(self._views.attention, query_lens=shape.most_queries, kv_lens=(longest,) * shape.num_requests)
        # Pipeline stages and expert-parallel ranks would not split in the same steps, and would wait for one another.
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
                self.logits = outputs.keep(model.compute_part(), shape)
                return step.wanted_outputs, *_computed_views(self._views.logits)

        found, self._replay_forward = recorder.record(forward, self._plan_attention)
        self.wanted_outputs, *computed = found
        self._results = replace(self._views, logits=_with_computed(self._views.logits, *computed))
        self.outcome = self.logits.new_empty(shape.num_requests, 1 + shape.width, dtype=torch.int64)
        ways = (Draws.BEST,) if purpose is DrawPurpose.DRAFT else tuple(Draws)
        self._replay_verify = {draws: recorder.record(partial(self._verify, runner, draws))[1] for draws in ways}

    def _verify(self, runner: StepRunner, draws: Draws) -> tuple[Tensor, ...]:
        """Compute the outcome from the logits, and copy the states at reached boundaries; recorded as its own graph."""
        step, requests = Step(self._views), replace(self._views.logits, draws=draws)
        outcome = outcome_on_all_ranks(
            runner.ranks, requests, lambda: verify_step(requests, runner.wanted_logits(step, self.logits), [])
        )
        copy_reached_boundaries(self._views, outcome, self._memory)
        self.outcome.copy_(outcome)
        return ()

    def reads_blocks_of(self, requests: Sequence[RunningRequest]) -> bool:
        """Return whether the captured attention can address all KV blocks of the step's prompts."""
        last = self._attention.last_block
        return last is None or all(max(request.block_ids) <= last for request in requests[num_decoding(requests) :])

    def lay_out(self, requests: Sequence[RunningRequest], *, draws_ratios: bool) -> StepBatch:
        """Copy a step that fits the shape to the device; return its batch without padding.

        If the forward pass is split, the first graph is launched, and runs while the host plans attention.
        """
        buffers, geometry, before = self._memory.step_buffers, self._memory.geometry, self._latest.of(self)
        if before is not None and not draws_ratios and before.step.continues(requests, buffers, geometry.block_size):
            self._memory.prepare(())
            sent = send_again(before.step, requests, buffers, geometry.block_size, self.shape.num_requests)
            return self._note_next(before, sent)
        padded = self.shape.pad(requests, geometry.dummy_block)
        send_padded_step(padded, buffers, geometry, self.shape, draws_ratios=draws_ratios, purpose=self._purpose)
        self._memory.prepare(requests[num_decoding(requests) :])
        self._replay_forward.begin()
        batch, step = self._batch_of(requests, padded), DecodeStep.sent(requests, buffers)
        self._latest.note(None if step is None else SentStep(self, step, batch))
        self._unplanned = batch.attention
        return batch

    def _plan_attention(self) -> None:
        """Plan attention once for the last laid-out step: before its forward pass, or within it if `_plans_inside`."""
        if self._unplanned is not None:
            self._attention.plan_again(self._unplanned)
            self._unplanned = None

    def can_launch_next(self, requests: Sequence[RunningRequest], tokens: Sequence[int] | None) -> bool:
        """Return whether the next step may be launched; see `CapturedStep`."""
        before = self._latest.of(self)
        return before is not None and before.step.can_launch_next(requests, tokens, self._memory.step_buffers)

    def launch_next(self, requests: Sequence[RunningRequest]) -> OverlappedStep:
        """Launch the next step; see `CapturedStep`."""
        before, buffers = self._latest.of(self), self._memory.step_buffers
        if before is None or before.step.ends is None:
            raise CacheIntegrityError(
                "cannot launch the next step from this step's tokens alone; check can_launch_next()"
            )
        sent = send_next(before.step, buffers, self._memory.geometry.block_size, self.shape.num_requests)
        self._memory.prepare(())
        batch = self._note_next(before, sent)
        buffers.feed(self.outcome[: len(requests), 1])  # decode requests are first
        self.forward()
        state = OverlapState.FORWARD
        if not (before.batch.logits.any_changed or any_masked(requests)):  # otherwise the host needs the tokens first
            self.verify(before.step.draws)
            state = OverlapState.OUTCOME
        return OverlappedStep(self, batch, before.step.ends, state)

    def can_follow(self, requests: Sequence[RunningRequest]) -> bool:
        """Return whether `launch_followed` may be called; see `CapturedStep`."""
        before, memory = self._latest.of(self), self._memory
        return before is not None and can_follow(
            before.step,
            requests,
            memory.step_buffers,
            memory.geometry.block_size,
            self._longest,
            is_planned=self._attention.is_planned,
        )

    def launch_followed(self, requests: Sequence[RunningRequest], follow: Callable[[], None]) -> OverlappedStep:
        """Launch the next step with drafts; see `CapturedStep`."""
        before, memory = self._latest.of(self), self._memory
        if before is None:
            raise CacheIntegrityError("another step was sent since; check can_follow() before launch_followed()")
        sent = send_followed(before.step, memory.step_buffers, memory.geometry.block_size, self.shape.num_requests)
        memory.prepare(())
        batch = self._note_next(before, sent)
        self._plan_attention()  # it writes the lengths of last blocks, which `follow` then replaces
        follow()
        self.forward()
        self.verify(before.step.draws)
        return OverlappedStep(self, batch, None, OverlapState.OUTCOME, has_device_drafts=True)

    def _note_next(self, before: SentStep, step: DecodeStep) -> StepBatch:
        """Record a sent step that continues `before`; return its batch. Plan attention again if KV blocks changed."""
        kv_lens = tuple(self._memory.step_buffers.host("kv_lengths")[: self.shape.num_requests].tolist())
        batch = replace(before.batch, attention=replace(before.batch.attention, kv_lens=kv_lens))
        self._latest.note(SentStep(self, step, batch))
        if step.has_new_blocks:
            self._unplanned = batch.attention
        return batch

    def _batch_of(self, requests: Sequence[RunningRequest], padded: Sequence[RunningRequest]) -> StepBatch:
        """Return the step's batch, which contains the requests without padding."""
        results, shape = self._results, self.shape
        num_decode = num_decoding(requests)
        row_indices = shape.row_indices(requests)
        starts = logits_starts(padded)
        return replace(
            results,
            requests=tuple(requests),
            request_ids=tuple(request.request_id for request in requests),
            row_indices=row_indices,
            num_tokens=sum(request.scheduled for request in requests),
            num_decode_requests=num_decode,
            num_decode_tokens=sum(request.scheduled for request in requests[:num_decode]),
            attention=replace(
                results.attention,
                query_lens=tuple(request.scheduled for request in padded),
                kv_lens=tuple(request.computed + request.scheduled for request in padded),
            ),
            logits=replace(
                results.logits,
                starts=(*(starts[row] for row in row_indices), starts[-1]),
                draws=Draws.of(requests),
                any_changed=any_changed(requests),
                any_scored=any_scored(requests),
                end_tokens=end_tokens(requests),
            ),
        )

    def forward(self) -> Tensor:
        """Compute the logits of the step that was laid out last; those of padding are meaningless."""
        if not self._plans_inside:
            self._plan_attention()
        self._model.receive(self.shape.num_tokens)
        self._replay_forward.finish()  # decode steps are not split and need no `begin`
        self._model.send(self.logits)
        return self.logits

    def verify(self, draws: Draws) -> Tensor:
        """Sample tokens, verify drafts, and copy states at reached boundaries after `forward`; return the outcome."""
        self._replay_verify[draws]()
        return self.outcome

    @torch.inference_mode()
    def adopt(self, outcome: Tensor) -> None:
        """Store an outcome that was computed without `verify`, to feed the next step."""
        self.outcome.copy_(outcome)


def _computed_views(logits: StepLogits) -> tuple[Tensor, ...]:
    """Return the tensors that are computed from the step buffers and read after the forward pass."""
    return logits.temperature, logits.top_k, logits.top_p, logits.verify.draft_ids


def _with_computed(
    logits: StepLogits, temperature: Tensor, top_k: Tensor, top_p: Tensor, draft_ids: Tensor
) -> StepLogits:
    verify = replace(logits.verify, draft_ids=draft_ids)
    return replace(logits, temperature=temperature, top_k=top_k, top_p=top_p, verify=verify)
