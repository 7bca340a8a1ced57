"""One engine step, from its layout until its tokens are processed or it fails."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import CacheIntegrityError
from ..kernels.attention.interface import PlannedAttention
from ..policy.requests import RunningRequest
from .batch import StepBatch
from .logits import any_masked, any_scored
from .overlapped_step import CapturedStep


def no_attention(*_: object) -> Tensor:
    """Raise `CacheIntegrityError`; used as `attend` if no layer may call attention, e.g. in a step run by a graph."""
    raise CacheIntegrityError("a layer called attention outside the forward pass of its step")


def any_sampled(draft_distributions: Sequence[Tensor | None]) -> bool:
    """Return whether any drafts were sampled from distributions; their verification needs random numbers."""
    return any(sampled is not None for sampled in draft_distributions)


@dataclass(slots=True, eq=False)
class Step:
    """Inputs of one step, and the outputs of its forward pass that sampling needs.

    Args:
        batch: Device views of the step's inputs.
        attend: Attention function, planned for these requests.
        graph: Graph that computes the step; None if the step runs eagerly.
        draft_distributions: For each decode request, the distributions that its drafts were sampled from, or None for
            other drafts. The sequence may be empty if every entry would be None.
        wanted_outputs: [logits, hidden] last-layer outputs from which logits are computed, or the selected logits if
            the model computes logits for every token.
        hidden_states: [tokens, hidden] last-layer outputs of all tokens during the forward pass, and after it if a
            prompt is scored; empty if a graph computes the step, or if the model computes logits for every token.
    """

    batch: StepBatch
    attend: PlannedAttention = no_attention
    graph: CapturedStep | None = None
    draft_distributions: Sequence[Tensor | None] = ()
    wanted_outputs: Tensor = field(default_factory=lambda: torch.empty(0))
    hidden_states: Tensor = field(default_factory=lambda: torch.empty(0))

    @staticmethod
    def of_graph(
        graph: CapturedStep, requests: Sequence[RunningRequest], draft_distributions: Sequence[Tensor | None]
    ) -> "Step":
        """Lay out the scheduled requests for a graph; return the step, which the graph will compute."""
        batch = graph.lay_out(requests, draws_ratios=any_sampled(draft_distributions))
        return Step(batch, graph=graph, draft_distributions=draft_distributions, wanted_outputs=graph.wanted_outputs)

    @property
    def requests(self) -> tuple[RunningRequest, ...]:
        """The step's requests, decode requests first."""
        return self.batch.requests

    @property
    def num_drafts(self) -> list[int]:
        """[requests] number of drafts that are verified for each request."""
        return [len(request.drafts) for request in self.batch.requests]

    @property
    def num_prefill_requests(self) -> int:
        """Number of requests that prefill."""
        return len(self.batch.requests) - self.batch.num_decode_requests

    @property
    def num_padded_tokens(self) -> int:
        """Number of tokens that the device computes, padding included."""
        return self.batch.num_tokens if self.graph is None else self.graph.shape.num_tokens

    @property
    def num_padded_requests(self) -> int:
        """Number of requests that the device computes, padding included."""
        return len(self.batch.requests) if self.graph is None else self.graph.shape.num_requests

    @property
    def has_one_token_each(self) -> bool:
        """True if all requests decode without drafts."""
        return not self.num_prefill_requests and self.batch.num_tokens == len(self.requests)

    def verifying_graph(self, *, only_last_logits: bool) -> CapturedStep | None:
        """Return the graph if it can sample and verify this step from its logits, masked or not; otherwise None.

        Args:
            only_last_logits: True if the model returns logits only for the tokens in `StepBatch.logits`. Otherwise the
                graph itself selects these logits while it verifies, so the host cannot mask them first.
        """
        graph = self.feeding_graph
        if graph is None or self.batch.logits.any_changed or not graph.can_verify:
            return None
        if any_masked(self.requests) and (not only_last_logits or any_scored(self.requests)):
            return None  # log-probabilities use the unmasked logits
        return graph

    @property
    def feeding_graph(self) -> CapturedStep | None:
        """Graph whose outcome can be fed to the next step; None without a graph or if drafts were sampled."""
        return None if any_sampled(self.draft_distributions) else self.graph

    def select_outputs(self, outputs: Tensor, *, are_hidden_states: bool = False) -> Tensor:
        """Store and return the rows of `outputs` for the tokens in `StepBatch.logits`, [logits, n].

        These are each request's last token and the tokens before its drafts. Also store hidden states of all tokens.

        Args:
            outputs: [1, tokens, n] hidden states or logits.
        """
        if are_hidden_states:
            self.hidden_states = outputs.squeeze(0)
        tokens, found = self.batch.logits.tokens, outputs.squeeze(0)
        # A pure decode step needs the outputs of all tokens, in order, so no selection is necessary.
        are_all = self.batch.prefill is None and len(tokens) == len(found)
        self.wanted_outputs = found if are_all else found.index_select(0, tokens)
        return self.wanted_outputs

    def end_forward(self) -> None:
        """Free the hidden states of all tokens, unless log-probabilities of prompt tokens are computed from them."""
        if not any(request.scores_prompt for request in self.requests):
            self.hidden_states = torch.empty(0)
