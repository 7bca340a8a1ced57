"""Apply logit biases, penalties for repeated tokens, and token masks to the logits of a step.

The changes at a position depend only on the request's text before it, including drafts. The sampled tokens therefore do
not depend on the number of drafts, the batch or the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..kernels.sampling.logits_changes import PenalizedRows, penalize
from ..policy.requests import RunningRequest
from .grammar_masks import GrammarMasks


@dataclass(slots=True)
class _Text:
    """A request's row in the token-count tables, and how many of its generated tokens have been counted."""

    row: int
    num_counted: int = 0


class SeenTokens:
    """Device tables with each request's token counts, [requests, vocab]; they grow with the number of requests."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}
        self._unused: list[int] = []
        self._counts = torch.empty(0, 0)
        self._in_prompt = torch.empty(0, 0, dtype=torch.uint8)

    @property
    def is_empty(self) -> bool:
        """True if no request has counted tokens."""
        return not self._texts

    def penalize(self, requests: Sequence[tuple[int, RunningRequest]], logits: Tensor) -> None:
        """Apply penalties to logits, [logits, vocab] float32, in place.

        Args:
            requests: Pairs of a request's first logits row and the request.
        """
        self._count(requests, logits)
        rows: list[int] = []
        texts: list[int] = []
        drafts: list[int] = []
        counts: list[int] = []
        settings: list[tuple[float, float, float]] = []
        for start, request in requests:
            asked, width = request.spec.sampling.logits, 1 + len(request.drafts)
            rows += range(start, start + width)
            texts += [self._texts[request.request_id].row] * width
            settings += [(asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty)] * width
            counts += range(width)
            drafts += (draft for before in range(width) for draft in request.drafts[:before])
        device = logits.device
        numbers = [*rows, *texts, 0, *accumulate(counts), *drafts]
        sent = torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)
        num = len(rows)
        penalize(
            logits,
            PenalizedRows(
                logits_rows=sent[:num],
                texts=sent[num : 2 * num],
                cu_drafts=sent[2 * num : 3 * num + 1],
                drafts=sent[3 * num + 1 :],
                settings=torch.tensor(settings, dtype=torch.float32).to(device, non_blocking=True),
                counts=self._counts,
                in_prompt=self._in_prompt,
            ),
        )

    def forget(self, request_id: int) -> None:
        """Forget the token counts of a request."""
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._unused.append(text.row)

    def _count(self, requests: Sequence[tuple[int, RunningRequest]], logits: Tensor) -> None:
        """Count the tokens that the requests have generated since the last call."""
        texts: list[int] = []
        tokens: list[int] = []
        for _, request in requests:
            text = self._texts.get(request.request_id) or self._begin(request, logits)
            new = request.generated_after(text.num_counted)
            text.num_counted += len(new)
            texts += [text.row] * len(new)
            tokens += new
        if tokens:
            rows = torch.tensor([texts, tokens]).to(logits.device, non_blocking=True)
            self._counts.index_put_((rows[0], rows[1]), self._counts.new_ones(()), accumulate=True)

    def _begin(self, request: RunningRequest, logits: Tensor) -> _Text:
        """Assign a cleared table row to a request, and mark its prompt tokens."""
        if not self._unused:
            self._grow(logits)
        text = self._texts[request.request_id] = _Text(self._unused.pop())
        prompt = torch.from_numpy(np.unique(request.spec.prompt[: request.first_generated]))
        self._counts[text.row].zero_()
        self._in_prompt[text.row].zero_()
        self._in_prompt[text.row, prompt.to(logits.device, non_blocking=True)] = 1
        return text

    def _grow(self, logits: Tensor) -> None:
        before, vocab_size = len(self._counts), logits.shape[1]
        size = max(1, 2 * before)
        counts = torch.zeros(size, vocab_size, device=logits.device)
        in_prompt = torch.zeros(size, vocab_size, dtype=torch.uint8, device=logits.device)
        if before:
            counts[:before], in_prompt[:before] = self._counts, self._in_prompt
        self._counts, self._in_prompt = counts, in_prompt
        self._unused += reversed(range(before, size))


_Requests = Sequence[tuple[int, RunningRequest]]
"""Pairs of a request's first logits row and the request."""


class LogitsChanges:
    """Applies the requests' changes to the logits of a step, and stores their token counts for penalties."""

    def __init__(self, masks: GrammarMasks) -> None:
        self.masks = masks
        self._seen = SeenTokens()

    def apply(self, requests: Sequence[RunningRequest], starts: Sequence[int], logits: Tensor) -> Tensor:
        """Return the changed logits, [logits, vocab], without modifying the arguments.

        Args:
            starts: [requests] index of each request's first logits row.
        """
        changed = [
            (start, request)
            for start, request in zip(starts, requests, strict=False)
            if request.spec.sampling.changes_logits and request.samples_this_step
        ]
        if not changed:
            return logits
        logits = logits.to(torch.float32, copy=True)
        self.masks.apply(logits)
        _add_biases(changed, logits)
        _mask_ends(changed, logits)
        penalized = [(start, request) for start, request in changed if request.spec.sampling.logits.depends_on_text]
        if penalized:
            self._seen.penalize(penalized, logits)
        _mask_improbable(changed, logits)
        return logits

    def forget(self, request_id: int) -> None:
        """Forget the grammar matcher and the token counts of a request."""
        self.masks.forget(request_id)
        self._seen.forget(request_id)


def _add_biases(requests: _Requests, logits: Tensor) -> None:
    biased = [
        (row, token, bias)
        for start, request in requests
        for token, bias in request.spec.sampling.logits.logit_bias
        for row in range(start, start + 1 + len(request.drafts))
    ]
    if biased:
        rows, tokens, biases = zip(*biased, strict=True)
        at = torch.tensor([rows, tokens]).to(logits.device, non_blocking=True)
        added = torch.tensor(biases, dtype=torch.float32).to(logits.device, non_blocking=True)
        logits.index_put_((at[0], at[1]), logits[at[0], at[1]] + added)


def _mask_ends(requests: _Requests, logits: Tensor) -> None:
    """Mask the end tokens at positions before which a request has fewer than `min_tokens` generated tokens."""
    masked = []
    for start, request in requests:
        sampling = request.spec.sampling
        num_masked = min(
            sampling.logits.min_tokens - (request.length - request.first_generated), 1 + len(request.drafts)
        )
        if num_masked > 0:
            ends = [end for end in sampling.end_ids if end < logits.shape[1]]
            masked += [(start + row, end) for row in range(num_masked) for end in ends]
    if masked:
        at = torch.tensor(masked).T.to(logits.device, non_blocking=True)
        logits.index_put_((at[0], at[1]), logits.new_full((), float("-inf")))


def _mask_improbable(requests: _Requests, logits: Tensor) -> None:
    """Mask tokens whose probability is below `min_p` times the highest probability."""
    rows: list[int] = []
    distances: list[float] = []
    for start, request in requests:
        sampling = request.spec.sampling
        if sampling.logits.min_p > 0 and not sampling.is_greedy:
            width = 1 + len(request.drafts)
            rows += range(start, start + width)
            distances += [sampling.temperature * float(np.log(sampling.logits.min_p))] * width
    if rows:
        at = torch.tensor(rows).to(logits.device, non_blocking=True)
        distance = torch.tensor(distances, dtype=torch.float32).to(logits.device, non_blocking=True)
        found = logits.index_select(0, at)
        least = found.amax(dim=-1, keepdim=True) + distance[:, None]
        logits.index_copy_(0, at, found.masked_fill_(found < least, float("-inf")))
