"""Engine that records the logits of each generated token."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from megatron.core.inference.sampling_params import SamplingParams
from torch import Tensor

from megatron_mamba_cache import CacheConfig, build_engine
from megatron_mamba_cache.mcore.step_report import failure_reason


@dataclass(slots=True)
class Trace:
    """Greedy output of a request.

    Args:
        logits: One [vocab] tensor per generated token; empty if logits are not recorded.
        cached: Number of prompt tokens that needed no prefill.
    """

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    cached: int = 0


@dataclass(slots=True)
class StepTimes:
    """Times of an engine's steps in seconds, and numbers of processed tokens.

    A step with at least one prompt token counts as prefill.
    """

    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0


class TracedEngine:
    """Engine with its own model that records the output of each request."""

    def __init__(self, model: Any, config: CacheConfig, *, keeps_logits: bool = True) -> None:
        self.engine = build_engine(model, config)
        self._traces: dict[int, Trace] = {}
        self._keeps_logits = keeps_logits
        self._hook = model.output_layer.register_forward_hook(self._note_logits)

    @classmethod
    @contextmanager
    def over(cls, model: Any, config: CacheConfig, *, keeps_logits: bool = True) -> Iterator[Self]:
        """Context manager that yields an engine and frees its memory at the end."""
        traced = cls(model, config, keeps_logits=keeps_logits)
        try:
            yield traced
        finally:
            traced._hook.remove()
            traced.engine.close()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def serve(self, prompts: Mapping[int, Sequence[int]], num_tokens: int) -> dict[int, Trace]:
        """Run requests concurrently to their end; their ids must be new to the engine."""
        return self.timed(prompts, num_tokens)[0]

    def timed(self, prompts: Mapping[int, Sequence[int]], num_tokens: int) -> tuple[dict[int, Trace], StepTimes]:
        """Run requests concurrently to their end, and time the steps.

        Raises:
            RuntimeError: If a request fails.
        """
        for request_id, prompt in prompts.items():
            self._traces[request_id] = Trace()
            greedy = SamplingParams(num_tokens_to_generate=num_tokens, top_k=1, termination_id=-1)
            self.engine.add_request(request_id, list(prompt), greedy)
        times = StepTimes()
        while self.engine.has_unfinished_requests():
            for record in self._step(times)["finished_request_records"]:
                self._finish(record.merge())
        return {request_id: self._traces.pop(request_id) for request_id in prompts}, times

    def lose_states(self) -> None:
        """Set all states to zero between requests.

        Every request that then resumes from a cached state computes wrong logits.
        """
        pool = self.engine.context.memory.state_pool
        for states in pool.tensors:
            states.zero_()

    def _step(self, times: StepTimes) -> Any:
        counters = self.engine.context.counters
        prefilled, decoded = counters.prefill_tokens_computed, counters.decode_tokens_computed
        began = time.perf_counter()
        result = self.engine.step_modern()  # returns after the tokens were copied to the host
        seconds = time.perf_counter() - began
        if counters.prefill_tokens_computed > prefilled:
            times.prefill_s += seconds
            times.prefill_tokens += counters.prefill_tokens_computed - prefilled
        else:
            times.decode_s += seconds
            times.decode_tokens += counters.decode_tokens_computed - decoded
        return result

    def _finish(self, request: Any) -> None:
        reason = failure_reason(request)
        if reason is not None:
            raise RuntimeError(f"request {request.request_id} failed: {reason}")
        trace = self._traces[request.request_id]
        trace.tokens = list(request.generated_tokens)
        trace.cached = self.engine.cached_tokens(request.request_id)

    def _note_logits(self, _module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> None:
        if not self._keeps_logits:
            return
        step, logits = self.engine.context.step.batch, output[0].flatten(0, 1)  # [logits, vocab]
        for request, index in zip(step.requests, step.logits.starts, strict=False):  # `starts` also has the last end
            if request.samples_this_step:
                self._traces[request.request_id].logits.append(logits[index].clone())
