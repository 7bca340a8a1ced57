"""One engine step, from its layout until it has landed or failed."""

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


def no_attention(*_: Tensor) -> Tensor:
    """Raise an error, because no layer may run during a graph replay or after the forward pass."""
    raise CacheIntegrityError("a layer requested attention outside its step's forward")


def any_sampled(draft_distributions: Sequence[Tensor | None]) -> bool:
    """Return whether any drafts were sampled, so that verifying them needs random numbers."""
    return any(sampled is not None for sampled in draft_distributions)


@dataclass(slots=True, eq=False)
class Step:
    """Inputs of one step, and the outputs of its forward pass that sampling needs.

    Args:
        batch: Views of the step's requests on the device.
        attend: Attention call that was planned for these requests.
        graph: Graph that computes the step; None if the step runs eagerly.
        draft_distributions: For each decode request, the distributions of its drafts, None if they were not sampled;
            empty where they all are.
        wanted_outputs: [logits, hidden] outputs of the last layer that logits are computed from, or the logits
            themselves where the model computes those of every token.
        scored_hidden_states: [tokens, hidden] hidden states of all tokens if prompt log-probs are wanted, else empty.
    """

    batch: StepBatch
    attend: PlannedAttention = no_attention
    graph: CapturedStep | None = None
    draft_distributions: Sequence[Tensor | None] = ()
    wanted_outputs: Tensor = field(default_factory=lambda: torch.empty(0))
    scored_hidden_states: Tensor = field(default_factory=lambda: torch.empty(0))

    @staticmethod
    def of_graph(
        graph: CapturedStep, requests: Sequence[RunningRequest], draft_distributions: Sequence[Tensor | None]
    ) -> "Step":
        """Send scheduled requests to a graph; return the step that it computes."""
        batch = graph.lay_out(requests, draws_ratios=any_sampled(draft_distributions))
        return Step(batch, graph=graph, draft_distributions=draft_distributions, wanted_outputs=graph.wanted_outputs)

    @property
    def requests(self) -> tuple[RunningRequest, ...]:
        """The step's requests, decode requests first."""
        return self.batch.requests

    @property
    def num_drafts(self) -> list[int]:
        """[requests] drafts of each request that are verified."""
        return [len(request.drafts) for request in self.batch.requests]

    @property
    def num_prefill_requests(self) -> int:
        """Number of requests that compute prompt tokens."""
        return len(self.batch.requests) - self.batch.num_decode_requests

    @property
    def num_padded_tokens(self) -> int:
        """Number of computed tokens, padding included."""
        return self.batch.num_tokens if self.graph is None else self.graph.shape.num_tokens

    @property
    def num_padded_requests(self) -> int:
        """Number of computed requests, padding included."""
        return len(self.batch.requests) if self.graph is None else self.graph.shape.num_requests

    @property
    def has_one_token_each(self) -> bool:
        """True if all requests decode without drafts."""
        return not self.num_prefill_requests and self.batch.num_tokens == len(self.requests)

    def verifying_graph(self, *, only_last_logits: bool) -> CapturedStep | None:
        """Return the graph if it can verify the step, from logits that may have been masked; else None.

        Args:
            only_last_logits: As in `StepRunner`; the logits of other steps are selected inside the graph.
        """
        graph = self.feeding_graph
        if graph is None or self.batch.logits.any_changed or not graph.can_verify:
            return None
        if any_masked(self.requests) and (not only_last_logits or any_scored(self.requests)):
            return None  # log-probabilities use the unmasked logits
        return graph

    @property
    def feeding_graph(self) -> CapturedStep | None:
        """Graph whose outcome can be fed to the next step; None if drafts were sampled."""
        return None if any_sampled(self.draft_distributions) else self.graph

    def select_outputs(self, outputs: Tensor, *, are_hidden_states: bool = False) -> Tensor:
        """Select the wanted outputs, [logits, n], of the last layer's outputs or the logits, [1, tokens, n].

        Wanted are each request's last token and the tokens before its drafts. The step keeps them, and if prompts are
        scored, the hidden states of all tokens.
        """
        if are_hidden_states and any(request.scores_prompt for request in self.requests):
            self.scored_hidden_states = outputs.squeeze(0)
        tokens, found = self.batch.logits.tokens, outputs.squeeze(0)
        # In a pure decode step, the outputs of all tokens are needed, in order.
        are_all = self.batch.prefill is None and len(tokens) == len(found)
        self.wanted_outputs = found if are_all else found.index_select(0, tokens)
        return self.wanted_outputs
