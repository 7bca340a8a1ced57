"""Text-generation controller: run a step when Megatron asks for tokens, and return results in Megatron's format."""

from typing import Any

import torch
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from torch import Tensor
from typing_extensions import override

from ..step.padding_steps import take_part
from ..step.step_outcome import StepOutcome, ids_of
from .context import MambaCacheContext


class MambaCacheController(TextGenerationController):
    """Megatron's text-generation controller for a `MambaCacheContext`.

    A request's sampled tokens do not depend on which other requests are in the batch.
    """

    @property
    def context(self) -> MambaCacheContext:
        """Context that holds the cache and the running requests."""
        context: MambaCacheContext = self.inference_wrapped_model.inference_context
        return context

    @override
    def _init_dynamic_sampling_tensors(self) -> None:
        # Requests are kept on the host, so the device-to-host copies in Megatron's version are not needed.
        self._get_stop_word_finished_ids_callback = None
        self._sampling_backend = "torch"
        self._request_metadata: dict[str, Tensor] = {}

    @override
    @torch.inference_mode()
    async def async_generate_output_tokens_dynamic_batch(self, skip_bookkeeping: bool | None = False) -> Any:
        """Run one step.

        Returns:
            None if there is nothing to compute; otherwise Megatron's dict with two more entries: `kept_tokens`, all new
            tokens of each request (`sample` has only the last), and `num_drafts`, its number of verified draft tokens.
        """
        context = self.context
        if context.active_token_count == 0:
            context.digest.note_idle_step()
            if context.peers.num_ranks > 1:
                self.dummy_forward()  # other ranks may wait for this rank's experts
            return None
        outcome = await context.runner.run(self.inference_wrapped_model, lands=not skip_bookkeeping)
        result = _step_result(outcome)
        return result if skip_bookkeeping else result | _landing_result(outcome)

    @override
    @torch.inference_mode()
    def dummy_forward(self) -> None:
        """Run a step of padding tokens, because expert-parallel ranks run steps together; leave the cache unchanged."""
        take_part(self.inference_wrapped_model, self.context.runner)


def _step_result(outcome: StepOutcome) -> dict[str, Any]:
    """Return a step's tokens and log-probs under the keys that Megatron's engine reads."""
    kept, graph = outcome.kept.tokens, outcome.step.graph
    return {
        "sample": torch.tensor([new[-1] if new else 0 for new in kept], dtype=torch.int64),
        "kept_tokens": kept,
        "num_drafts": outcome.num_drafts,
        "cuda_graph_request_count": None if graph is None else graph.shape.num_requests,
        "log_probs": outcome.log_probs.of_tokens,
        "top_n_logprobs": outcome.log_probs.best,
        "prompt_log_probs": outcome.log_probs.of_prompts,
    }


def _landing_result(outcome: StepOutcome) -> dict[str, Any]:
    """Return the ids of the step's requests, and of those that ended, were paused or evicted, under Megatron's keys."""
    request_ids = outcome.step.batch.request_ids
    finished = [request_ids[index] for index in outcome.kept.ended]
    return {
        "active_request_ids": torch.tensor(request_ids, dtype=torch.int64),
        "finished_request_ids": torch.tensor(finished, dtype=torch.int64),
        "newly_paused_request_ids": ids_of(outcome.held_back.paused),
        "evict_request_ids": ids_of(outcome.held_back.evicted),
    }
