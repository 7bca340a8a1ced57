"""The controller: publishes after the forward, samples with each request's random numbers, verifies drafts and ends
requests."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from torch import Tensor

from ..policy.requests import KeptTokens, RunningRequest
from ..step.host_copy import HostCopy
from ..step.log_probs import followed_tokens, selected_log_probs, top_n_log_probs
from ..step.padding_rows import decode_padding_row
from ..step.step import Step
from .context import MambaCacheContext
from .prompt_log_probs import score_prompts, whole_scores
from .rank_digest import digest_of
from .ranks import num_expert_ranks
from .request_states import DraftCounts
from .served_model import compute_step
from .verify_step import copy_reached_boundaries, logits_on_all_ranks, outcome_on_all_ranks, verify_step


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
        # Rows live on the host, so the copies from the device that Megatron's version prepares are not needed.
        self._get_stop_word_finished_ids_callback = None
        self._sampling_backend = "torch"
        self._request_metadata: dict[str, Tensor] = {}
        self.digest = digest_of(self.context)

    @torch.inference_mode()
    async def async_generate_output_tokens_dynamic_batch(self, skip_bookkeeping: bool | None = False) -> Any:
        """Run one step; see Megatron.

        Returns:
            None if there is nothing to compute; else Megatron's dict with `kept_tokens`, each row's new tokens, the
            last of which is in `sample`, and `draft_counts`, each row's verified and kept drafts.
        """
        context = self.context
        if context.active_token_count == 0:
            self.digest.note_idle_step()
            if num_expert_ranks() > 1:
                self.dummy_forward()  # other ranks may be waiting for this rank's experts
            return None
        inputs = self._dynamic_step_context_init()
        self.digest.note_plan(context)
        logits = self._dynamic_step_forward_logits(*inputs)
        context.commit_step()
        await asyncio.sleep(0)  # the forward runs; other tasks may use the host
        if skip_bookkeeping:
            context.note_change()  # a caller that finishes the step may decide otherwise about its rows
        outcome, is_greedy = self._sample(logits)
        reading = HostCopy(outcome)
        if is_greedy:
            context.launch_next()
        found = reading.wait()  # the step's only wait
        if is_greedy and (tokens := self._early_tokens(found)):
            return self._report_plain_step(tokens)
        lines = (found[place] for place in context.step.batch.places)
        kept = [row.keep(new[:accepted]) for row, (accepted, *new) in zip(context.step.rows, lines, strict=True)]
        result = {
            "sample": torch.tensor([new.tokens[-1] if new.tokens else 0 for new in kept], dtype=torch.int64),
            "kept_tokens": [new.tokens for new in kept],
            "draft_counts": [_draft_counts(row, new) for row, new in zip(context.step.rows, kept, strict=True)],
            "cuda_graph_request_count": _graph_rows(context.step),
            **self._log_probs(logits, kept),
        }
        return result if skip_bookkeeping else result | self._finish_step(kept)

    @torch.inference_mode()
    def dummy_forward(self) -> None:
        """Run one dummy token for the ranks that share this rank's experts; the cache does not change."""
        context = self.context
        with context.rehearsing():
            context.lay_out([decode_padding_row(1, context.memory.blocks.dummy_block_idx)])
            compute_step(self.inference_wrapped_model, context)
            torch.cuda.synchronize()  # before the next step's integers overwrite this one's

    def _dynamic_step_forward_logits(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        graph = self.context.step.graph
        return compute_step(self.inference_wrapped_model, self.context) if graph is None else graph.forward()

    def _sample(self, logits: Tensor) -> tuple[Tensor, bool]:
        """Sample, verify, and copy the states of reached boundaries.

        Returns:
            The outcome, [rows, 2 + K] at the step's places: how many tokens each row accepts, then these tokens; and
            whether the step is greedy.
        """
        context = self.context
        step, is_greedy = context.step, context.step.is_greedy
        if step.graph is not None and is_greedy:
            return step.graph.verify_greedily(), True
        outcome = outcome_on_all_ranks(
            context, lambda: verify_step(step.batch.logits, context.wanted_logits(logits), step.draft_distributions)
        )
        copy_reached_boundaries(step.batch, outcome, context.memory)
        return outcome, is_greedy

    def _early_tokens(self, found: Sequence[Sequence[int]]) -> list[int]:
        """Return the rows' tokens, [rows], if the next step is or can be launched with them and no row ends; else [].

        Args:
            found: The outcome of a greedy step, [rows, 2 + K] at the step's places.
        """
        context = self.context
        tokens = [found[place][1] for place in context.step.batch.places]
        context.launch_next(tokens)
        early = context.early_step
        return [] if early is None or early.any_ends(tokens) else tokens

    def _log_probs(self, logits: Tensor, kept: Sequence[KeptTokens]) -> dict[str, Any]:
        context = self.context
        step = context.step.batch
        if not any(row.spec.log_probs.wanted for row in step.rows):
            return {"log_probs": None, "top_n_logprobs": None}
        only_last = context.materialize_only_last_token_logits
        if only_last:
            score_prompts(context, self.inference_wrapped_model.logits_of)
        places = followed_tokens(step, [new.tokens for new in kept], only_last=only_last)
        log_probs = F.log_softmax(logits_on_all_ranks(context, logits).squeeze(0).float(), dim=-1)
        return {
            "log_probs": selected_log_probs(places, log_probs),
            "top_n_logprobs": top_n_log_probs(step, places, log_probs),
            "prompt_log_probs": whole_scores(step.rows) if only_last else None,
        }

    def _finish_step(self, kept: Sequence[KeptTokens]) -> dict[str, Any]:
        context = self.context
        rows, row_ids = context.step.rows, context.step.batch.request_ids
        finished = [request_id for request_id, new in zip(row_ids, kept, strict=True) if new.ends]
        outcome = context.finish_step(kept)
        self.digest.note_outcome(context, rows, kept)
        return {
            "active_request_ids": torch.tensor(row_ids, dtype=torch.int64),
            "finished_request_ids": torch.tensor(finished, dtype=torch.int64),
            **outcome,
        }

    def _report_plain_step(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Finish and report a step whose successor runs already: one token a row and nothing else."""
        context = self.context
        step = context.step
        return {
            "sample": torch.tensor(tokens, dtype=torch.int64),
            "kept_tokens": list(zip(tokens, strict=True)),
            "draft_counts": [_NO_DRAFTS] * len(tokens),
            "cuda_graph_request_count": _graph_rows(step),
            "log_probs": None,
            "top_n_logprobs": None,
            "active_request_ids": torch.tensor(step.batch.request_ids, dtype=torch.int64),
            "finished_request_ids": torch.empty(0, dtype=torch.int64),
            **context.finish_plain_step(tokens),
        }


_NO_DRAFTS = DraftCounts()


def _graph_rows(step: Step) -> int | None:
    return None if step.graph is None else step.graph.shape.num_rows


def _draft_counts(row: RunningRequest, kept: KeptTokens) -> DraftCounts:
    return DraftCounts(len(row.drafts), len(kept.tokens) - 1) if row.drafts else _NO_DRAFTS
