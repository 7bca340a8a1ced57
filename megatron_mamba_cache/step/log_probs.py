"""Compute log-probabilities of generated and prompt tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..policy.request_settings import ScoredToken
from ..policy.requests import RunningRequest
from ..ranks.group import Ranks
from .batch import StepBatch
from .buffers import HostCopy
from .logits import any_scored
from .prompt_log_probs import score_prompts, whole_scores
from .step import Step
from .verify import logits_on_all_ranks


@dataclass(frozen=True, slots=True)
class StepLogProbs:
    """Log-probabilities that a step returns; a field is None if no request asked for it.

    Args:
        of_tokens: [requests] log-probabilities of the tokens that follow the computed ones; an entry is None if not
            requested.
        best: By request index, (log-probabilities, token ids) of the most likely tokens at each position.
        of_prompts: By request index, the prompt log-probabilities of requests whose prefill ends in this step.
    """

    of_tokens: Sequence[list[float] | None] | None = None
    best: Mapping[int, list[tuple[Tensor, Tensor]]] | None = None
    of_prompts: Mapping[int, list[ScoredToken]] | None = None


NO_LOG_PROBS = StepLogProbs()


def step_log_probs(step: StepBatch, kept: Sequence[Sequence[int]], logits: Tensor, *, only_last: bool) -> StepLogProbs:
    """Compute the requested log-probabilities; with `only_last`, requests already store those of their prompts.

    Args:
        kept, only_last: As in `followed_tokens`.
        logits: [n, vocab] unmodified logits of the model.
    """
    followed = followed_tokens(step, kept, only_last=only_last)
    log_probs = F.log_softmax(logits.float(), dim=-1)
    return StepLogProbs(
        of_tokens=selected_log_probs(followed, log_probs),
        best=top_n_log_probs(step, followed, log_probs),
        of_prompts=whole_scores(step.requests) if only_last else None,
    )


class StepScorer:
    """Computes the log-probabilities that the requests of a step asked for.

    Args:
        vocab_size: Vocabulary size of the model, padding included.
        only_last: True if logits exist only for the tokens in `StepBatch.logits`, False if for every token.
    """

    def __init__(self, ranks: Ranks, vocab_size: int, *, only_last: bool) -> None:
        self._ranks = ranks
        self._vocab_size = vocab_size
        self._only_last = only_last

    def begin(self, step: Step, outcome: Tensor, logits: Tensor) -> "SampledTokenScores | None":
        """Start computing a one-token step's log-probabilities before the next step overwrites its logits.

        Args:
            outcome: Outcome of `verify_step`; each request is at its index in `StepBatch.row_indices`.
            logits: This rank's output of the forward pass.

        Returns:
            The scores; None if the step has prompts or drafts, or if no request asked for log-probabilities.
        """
        if not step.has_one_token_each or not self._scores(step):
            return None
        return SampledTokenScores(step.batch, outcome, self.logits_on_all_ranks(step, logits))

    def log_probs(
        self, step: Step, kept: Sequence[Sequence[int]], logits: Tensor, logits_of: Callable[[Tensor], Tensor]
    ) -> StepLogProbs:
        """Compute a step's log-probabilities if `begin` returned None for it.

        Args:
            kept: As in `followed_tokens`.
            logits: This rank's output of the forward pass.
            logits_of: Function from hidden states [n, hidden] to logits [n, vocab].
        """
        if not self._scores(step):
            return NO_LOG_PROBS
        if self._only_last:
            score_prompts(step, self._ranks, logits_of, self._vocab_size)
        return step_log_probs(step.batch, kept, self.logits_on_all_ranks(step, logits), only_last=self._only_last)

    def _scores(self, step: Step) -> bool:
        return step.batch.logits.any_scored and any_scored(step.requests)  # requests may have left since

    def logits_on_all_ranks(self, step: Step, output: Tensor) -> Tensor:
        """Return the logits, [n, vocab], bit-equal on all ranks, given each rank's output of the forward pass."""
        num_logits = step.batch.logits.tokens.shape[0] if self._only_last else step.num_padded_tokens
        return logits_on_all_ranks(self._ranks, output, num_logits, self._vocab_size).squeeze(0)


class SampledTokenScores:
    """Log-probabilities of a one-token step's sampled tokens, while they are copied to the host.

    Args:
        outcome: Outcome of `verify_step`; each request is at its index in `StepBatch.row_indices`.
        logits: [n, vocab] unmodified logits of the model; they may be overwritten afterwards.
    """

    def __init__(self, step: StepBatch, outcome: Tensor, logits: Tensor) -> None:
        wanted = [index for index, request in enumerate(step.requests) if _is_wanted(request)]
        self._settings = {index: step.requests[index].spec.log_probs.top_n for index in wanted}
        self._num_requests = len(step.requests)
        tokens = _rows_of(outcome, [step.row_indices[index] for index in wanted])[:, 1:2]
        found = _rows_of(logits, [step.logits.starts[index] for index in wanted])
        log_probs = F.log_softmax(found.float(), dim=-1)
        self._sampled = HostCopy(log_probs.gather(1, tokens))
        # One top-k call for each n, so that other requests do not affect how ties are broken.
        self._best = {
            num: tuple(map(HostCopy, torch.topk(log_probs, num))) for num in {*self._settings.values()} if num
        }

    def arrived(self) -> StepLogProbs:
        """Wait for the copy; return the requested log-probabilities."""
        of_tokens: list[list[float] | None] = [None] * self._num_requests
        for index, sampled in zip(self._settings, self._sampled.arrived().tolist(), strict=True):
            of_tokens[index] = sampled
        tables = {num: [copy.arrived() for copy in copies] for num, copies in self._best.items()}
        best = {
            index: [(values[line], ids[line])]
            for line, (index, num) in enumerate(self._settings.items())
            if num
            for values, ids in [tables[num]]
        }
        return StepLogProbs(of_tokens=of_tokens, best=best or None)


def _rows_of(table: Tensor, numbers: list[int]) -> Tensor:
    """Return the rows with these indices; leading rows are sliced, so that no indices are copied to the device."""
    if numbers == list(range(len(numbers))):
        return table[: len(numbers)]
    return table.index_select(0, torch.tensor(numbers).to(table.device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class FollowedTokens:
    """Consecutive logits rows of one request, with the actual next token for each."""

    logits: range
    followers: tuple[int, ...]


def followed_tokens(step: StepBatch, kept: Sequence[Sequence[int]], *, only_last: bool) -> list[FollowedTokens | None]:
    """Return each request's logits rows to score; an entry is None if the request needs no scores in this step.

    A prefill request's last computed token is followed by its sampled token, or in mid-prefill by its next prompt
    token. A decode request's tokens are followed by the kept tokens. With `only_last`, the module `prompt_log_probs`
    scores the prompt tokens.

    Args:
        kept: [requests][tokens] new tokens that each request keeps; empty for a request in mid-prefill.
        only_last: True if logits exist only for the tokens in `StepBatch.logits`, False if for every token.
    """
    found: list[FollowedTokens | None] = []
    token_start = 0
    for index, (request, new) in enumerate(zip(step.requests, kept, strict=True)):
        token_end = token_start + request.scheduled
        if not _is_wanted(request) or (only_last and not request.samples_this_step):
            found.append(None)
        elif request.is_prefilling:
            end = request.computed + request.scheduled
            known = () if only_last else map(int, request.tokens(request.computed + 1, end))
            followers = (*known, *(new or map(int, request.tokens(end, end + 1))))
            last = step.logits.starts[index] if only_last else token_end - 1
            found.append(FollowedTokens(range(last + 1 - len(followers), last + 1), followers))
        else:
            first = step.logits.starts[index]  # decode requests come first and have logits for all tokens
            found.append(FollowedTokens(range(first, first + len(new)), tuple(new)))
        token_start = token_end
    return found


def selected_log_probs(followed: Sequence[FollowedTokens | None], log_probs: Tensor) -> list[list[float] | None]:
    """Return each request's log-probabilities of the actual next tokens; None where `followed` is None.

    Args:
        log_probs: [logits, vocab].
    """
    logits = [index for one in followed if one for index in one.logits]
    targets = [token for one in followed if one for token in one.followers]
    chosen = iter(log_probs[logits, targets].tolist())
    return [None if one is None else [next(chosen) for _ in one.followers] for one in followed]


def top_n_log_probs(
    step: StepBatch, followed: Sequence[FollowedTokens | None], log_probs: Tensor
) -> dict[int, list[tuple[Tensor, Tensor]]] | None:
    """Return top-n log-probabilities and their tokens by request index; None if no request asked for them."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for index, (request, one) in enumerate(zip(step.requests, followed, strict=True)):
        settings = request.spec.log_probs
        if settings.top_n and one is not None:
            skips = settings.skip_prompt and request.is_prefilling
            best = torch.topk(log_probs[list(one.logits[-1:] if skips else one.logits)], settings.top_n)
            found[index] = list(zip(best.values.cpu(), best.indices.cpu(), strict=True))
    return found or None


def _is_wanted(request: RunningRequest) -> bool:
    settings = request.spec.log_probs
    return settings.wanted and (request.samples_this_step or not settings.skip_prompt)
