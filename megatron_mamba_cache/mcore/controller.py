"""The controller: publishes after the forward, samples with numbers of the request's own, and ends requests."""

from typing import Any

import torch
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from torch import Tensor

from ..kernels.sampling import greedy_tokens, sample_tokens
from .context import MambaCacheContext
from .log_probs import top_n_log_probs


class MambaCacheController(TextGenerationController):
    """Megatron's generation loop over a `MambaCacheContext`.

    A request's random numbers depend on its seed and the position only, so its tokens do not depend on the batch.
    """

    @property
    def context(self) -> MambaCacheContext:
        """The inference context."""
        context: MambaCacheContext = self.inference_wrapped_model.inference_context
        return context

    def _init_dynamic_sampling_tensors(self) -> None:
        # Rows live on the host, so there is nothing to copy from the device as Megatron's version prepares.
        self._get_stop_word_finished_ids_callback = None
        self._sampling_backend = "torch"
        self._request_metadata: dict[str, Tensor] = {}
        self._sampled_tokens_cuda = torch.empty(0, dtype=torch.int64)
        self._sampled_tokens: list[int] = []

    def _dynamic_step_forward_logits(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits = super()._dynamic_step_forward_logits(input_ids, position_ids)
        self.context.commit_step()
        return logits

    def _dynamic_step_sample_bookkeeping(self) -> None:
        """Do nothing: each row's sampling settings travel in the step's buffer."""

    def _dynamic_step_sample_logits(self, logits: Tensor) -> None:
        context = self.context
        last = logits.squeeze(0) if context.materialize_only_last_token_logits else context.last_token_logits(logits)
        rows = context.step.sampling
        if rows.all_greedy:
            self._sampled_tokens_cuda = greedy_tokens(last)
        else:
            self._sampled_tokens_cuda = sample_tokens(last, rows.temperature, rows.top_k, rows.top_p, rows.uniforms)

    def _dynamic_step_log_probs_bookkeeping(self) -> tuple[bool, bool]:
        wishes = [row.spec.log_probs for row in self.context.step.rows]
        return any(wish.wanted for wish in wishes), any(wish.top_n > 0 for wish in wishes)

    def _dynamic_step_calculate_top_n_logprobs(self, logits: Tensor, log_probs_tensor: Tensor | None = None) -> Any:
        assert log_probs_tensor is not None
        return top_n_log_probs(self.context.step, log_probs_tensor)

    def _dynamic_step_context_bookkeeping(self) -> dict[str, Any]:
        """Read the sampled tokens back, the step's one wait for the device, and advance the rows."""
        context = self.context
        rows = context.step.rows
        self._sampled_tokens = self._sampled_tokens_cuda.tolist()
        goes_on = [
            not (row.samples_this_step and row.ends_with(token))
            for row, token in zip(rows, self._sampled_tokens, strict=True)
        ]
        row_ids = [row.request_id for row in rows]
        finished = [request_id for request_id, stays in zip(row_ids, goes_on, strict=True) if not stays]
        update = context.update_requests(goes_on, self._sampled_tokens)
        return {
            "active_request_ids": torch.tensor(row_ids, dtype=torch.int64),
            "finished_request_ids": torch.tensor(finished, dtype=torch.int64),
            **update,
        }

    @torch.inference_mode()
    async def async_generate_output_tokens_dynamic_batch(self, skip_bookkeeping: bool | None = False) -> Any:
        """Run one step; see Megatron. The sample comes back as a CPU tensor: it has been read already."""
        result = await super().async_generate_output_tokens_dynamic_batch(skip_bookkeeping)
        if result is not None and not skip_bookkeeping:
            result["sample"] = torch.tensor(self._sampled_tokens, dtype=torch.int64)
        return result
