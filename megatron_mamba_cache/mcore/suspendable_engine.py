"""Engine operations between steps: warm-up, CUDA-graph capture, suspend, resume, and weight updates."""

import asyncio
import contextlib
import gc
import logging
from typing import Any

from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, RequestEntry
from megatron.core.utils import trace_async_exceptions
from typing_extensions import override

from ..kernels.compilation import WATCH, Compilations
from ..step.captured_shapes import engine_shapes
from ..step.graphs import capture_graphs, reason_to_capture_again
from ..step.warmup import compile_ahead, warm_up
from .context import MambaCacheContext
from .controller import MambaCacheController
from .engine_loop import EngineLoop
from .request_states import RequestStates, begin_next_part, tokens_after

_LOG = logging.getLogger(__name__)
LANDING_INTERVAL_S = 0.02
"""Seconds between checks of copies in flight while no request runs."""


class SuspendableEngine(DynamicInferenceEngine):
    """Base class of `MambaCacheEngine` with operations between steps; all ranks of a model must make the same calls."""

    context: MambaCacheContext
    controller: MambaCacheController
    failed_request_ids: list[int]
    _states: RequestStates
    _runs_in: EngineLoop
    _has_captured = False
    _has_compiled = False

    def warmup(self) -> Compilations:
        """Compile the kernels that steps will launch, before requests arrive; return the compiled kernels.

        This also reads the vocabulary for grammars. No request, state, block, counter or random number changes. On a
        CPU, nothing is compiled.
        """
        self.context.grammars.prepare()
        WATCH.install()  # another hook may have replaced ours
        before = WATCH.total
        self._compile_ahead()
        warm_up(self.controller.inference_wrapped_model, self.context.runner)
        return WATCH.total.since(before)

    @override
    def create_cuda_graphs(self, reset_context: bool = True) -> None:
        """Capture the configured step shapes as CUDA graphs, at the start and after a suspend that freed the graphs."""
        context = self.context
        if not context.is_tensor_state_allocated:  # Megatron calls this again after allocation
            return
        waits = self._has_captured and context.peers.num_ranks > 1  # other ranks may resume later
        self._has_captured = True
        context.runner.capture_by(self._capture, now=not waits)

    def _compile_ahead(self) -> None:
        if self._has_compiled:
            return
        self._has_compiled = True
        compile_ahead(self.controller.inference_wrapped_model, self.context.runner)

    def _capture(self) -> None:
        context, runner = self.context, self.context.runner
        runner.memory.below.drain()  # during a capture, no other thread may wait for the device
        runner.drop_graphs()  # drop first, so that the new graphs reuse the memory
        model = self.controller.inference_wrapped_model
        config, shape = context.cache_config, context.shape
        limits, is_shared = runner.memory.step_buffers.limits, runner.sharing.is_shared
        shapes = engine_shapes(config, limits, shape.most_launched, is_shared=is_shared)
        runner.adopt_graphs(capture_graphs(model, runner, config, shape, shapes, self._compile_ahead))

    def flush(self, weights_version: str | None = None) -> None:
        """Invalidate all cached prefixes; see `MambaCacheContext.flush`.

        If weights have moved in memory, CUDA graphs are captured again; a suspended engine does this when it resumes.
        Running requests continue from states that were computed with the old weights; to avoid that, suspend the engine
        first.
        """
        self.context.flush(weights_version)
        self._note_version()
        if not self.is_suspended:
            self._recapture_if_moved()
            self.context.planner.check_weights()

    @override
    def suspend(self) -> None:
        """Drop the running requests; free the context's memory unless `resident_pools` is set.

        After `resume`, the requests start again, oldest first, and keep their tokens. The weights may change before
        that.
        """
        if self.is_suspended:
            return
        self._change_version()  # an overlapped step, whose tokens had an earlier version, is dropped
        running = [
            request.request_id for request in sorted(self.context.running_requests, key=lambda request: request.age)
        ]
        waiting = list(self.waiting_request_ids)
        super().suspend()
        for request_id in self.requests.keys() - set(waiting):
            self.requests[request_id].record.requests.pop()  # Megatron has added an empty part to the record
        for request_id in running:
            self._restart(request_id)
        for request_id in waiting:
            self._states[request_id].candidate.forget_keys()
        self.resume_request_ids = [*running, *waiting]

    @override
    def resume(self, weights_version: str | None = None) -> None:
        """Continue with the model's current weights, in eval mode.

        Args:
            weights_version: Version of these weights; None keeps the previous version. Prefixes cached with another
                version are never used.

        Raises:
            ValueError: If a version is given to an engine that is not suspended; if another engine uses the drafter of
                the model's MTP head; on all ranks, if the version cannot be encoded as UTF-8 or differs between them. A
                suspended engine stays suspended.
        """
        if not self.is_suspended:
            if weights_version is not None:
                raise ValueError(
                    f"weights_version {weights_version!r} is given to resume(), but the engine is not suspended: call "
                    "flush(weights_version)"
                )
            return
        self.controller.inference_wrapped_model.use_memory()
        self.context.adopt_weights(weights_version)
        self._note_version()
        self.controller.inference_wrapped_model.model.eval()
        super().resume()
        self._runs_in.wake()
        if self.persist_cuda_graphs:
            self._recapture_if_moved()
        self.context.planner.check_weights()

    def close(self) -> None:
        """Free the memory and the CUDA graphs of an engine that will not run again.

        Later steps fail the waiting requests. On several ranks, call it before
        `torch.distributed.destroy_process_group`, where NCCL would otherwise wait forever for graphs with collectives.
        """
        self.context.planner.drop_graphs()
        self.context.release_memory()
        gc.collect()  # graphs are in reference cycles

    def cancel_request(self, request_id: int) -> bool:
        """Drop a running, waiting or suspended request between steps; return False if it is not in the engine.

        Its KV blocks, slots and draft window are released and its future is cancelled; its published prefixes stay in
        the cache, and no step reports it. Ranks that share the model cancel in the same order.

        Raises:
            RuntimeError: If a step is being computed; nothing has changed then.
        """
        entry = self._remove(request_id)
        if entry is None:
            return False
        entry.future.cancel()
        return True

    @override
    @trace_async_exceptions
    async def run_engine(self, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Run steps whenever there is work, until this task is cancelled; see Megatron's engine.

        Requests may be added at any time, from this loop's thread or from another thread.
        """
        self.use_coordinator = False
        with contextlib.suppress(asyncio.CancelledError), self._runs_in.entered(loop or asyncio.get_running_loop()):
            while True:
                await self._runs_in.wait_until(lambda: not self.is_suspended and self._has_work())
                if self.has_unfinished_requests():
                    await self.async_step()
                else:
                    self.land_idle_copies()
                    with contextlib.suppress(asyncio.TimeoutError):
                        has_requests = self._runs_in.wait_until(self.has_unfinished_requests)
                        await asyncio.wait_for(has_requests, LANDING_INTERVAL_S)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Event loop in which Megatron's engine creates futures and tasks."""
        return self._runs_in.current

    @_loop.setter
    def _loop(self, found: asyncio.AbstractEventLoop) -> None:
        """Ignore the value: Megatron sets the loop in which the engine was built, which may be closed."""

    @override
    def _run_coroutine_sync(self, coro: Any) -> Any:
        """Run a step from synchronous code; called by Megatron's `step_modern` and `generate`."""
        return self._runs_in.run(coro)

    def _has_work(self) -> bool:
        """Return whether there is a step to run or a finished copy to process."""
        is_one_rank = self.context.ranks.num_ranks == 1
        return self.has_unfinished_requests() or (is_one_rank and self.has_idle_copies)

    def _recapture_if_moved(self) -> None:
        """Capture CUDA graphs again if the weights have moved in memory on any rank."""
        model = self.controller.inference_wrapped_model
        reason = reason_to_capture_again(self.context.graphs, model, self.context.ranks)
        if reason is not None:
            advice = "load weights in place, with copy_, to keep the graphs"
            _LOG.warning("CUDA graphs are captured again: %s; %s", reason, advice)
            self.create_cuda_graphs()

    def _remove(self, request_id: int) -> RequestEntry | None:
        """Remove a request between steps and release what it holds; return its entry, or None if there is none."""
        if self.context.is_computing:
            raise RuntimeError("a step is in progress; cancel requests between steps")
        entry = self.requests.pop(request_id, None)
        if entry is None:
            return None
        self.context.drop_requests([request_id])
        for waiting in (self.waiting_request_ids, self.failed_request_ids, self.resume_request_ids or []):
            if request_id in waiting:
                waiting.remove(request_id)
        self._forget(request_id)
        return entry

    def _note_version(self) -> None:
        """Note that the version of the weights may have changed; a step that has been launched keeps the previous."""
        if not self.context.is_computing and self.context.overlapped_step is None:
            self._change_version()

    def _change_version(self) -> None:
        """Set the version of the tokens that later reports add to requests."""

        def num_generated(request_id: int) -> int:
            return len(tokens_after(0, self.requests[request_id].record.requests))

        self._states.change_version(self.context.weights_version, num_generated)

    def _restart(self, request_id: int) -> None:
        record = self.requests[request_id].record
        begin_next_part(record)
        state = self._states[request_id]
        state.candidate.restart(state.age, tokens_after(0, record.requests))

    def _forget(self, request_id: int) -> None:
        self._states.leave(request_id)
