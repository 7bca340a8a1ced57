"""Logits as requests change them: biases, penalties of tokens that were seen, and tokens that may not be drawn.

Every position of a row, those after its drafts too, is changed by the text before it alone, so that tokens do not
depend on drafts, on the batch or on what was cached.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..policy.requests import RunningRequest
from .grammar_masks import GrammarMasks
from .seen_tokens import SeenTokens

_Rows = Sequence[tuple[int, RunningRequest]]
"""Rows, and where the logits of each begin."""


class LogitsChanges:
    """Changes logits before tokens are drawn; keeps what each request with penalties has seen, on the device.

    Args:
        masks: What the grammars of rows allow.
    """

    def __init__(self, masks: GrammarMasks) -> None:
        self.masks = masks
        self._seen = SeenTokens()

    def apply(self, rows: Sequence[RunningRequest], starts: Sequence[int], logits: Tensor) -> Tensor:
        """Return the logits, [logits, vocab], that tokens are drawn from; the arguments stay as they are.

        Args:
            starts: [rows] where each row's logits begin.
        """
        changed = [
            (start, row)
            for start, row in zip(starts, rows, strict=False)
            if row.spec.sampling.changes_logits and row.samples_this_step
        ]
        if not changed:
            return logits
        logits = logits.to(torch.float32, copy=True)
        self.masks.apply(logits)
        _add_biases(changed, logits)
        _bar_ends(changed, logits)
        penalised = [(start, row) for start, row in changed if row.spec.sampling.logits.depends_on_text]
        if penalised:
            self._seen.penalise(penalised, logits)
        _bar_improbable(changed, logits)
        return logits

    def forget(self, request_id: int) -> None:
        """Forget what a request has seen."""
        self.masks.forget(request_id)
        self._seen.forget(request_id)


def _add_biases(rows: _Rows, logits: Tensor) -> None:
    biased = [
        (place, token, bias)
        for start, row in rows
        for token, bias in row.spec.sampling.logits.logit_bias
        for place in range(start, start + 1 + len(row.drafts))
    ]
    if biased:
        places, tokens, biases = zip(*biased, strict=True)
        at = torch.tensor([places, tokens]).to(logits.device, non_blocking=True)
        added = torch.tensor(biases, dtype=torch.float32).to(logits.device, non_blocking=True)
        logits.index_put_((at[0], at[1]), logits[at[0], at[1]] + added)


def _bar_ends(rows: _Rows, logits: Tensor) -> None:
    """Bar what ends a request before it has its least number of tokens."""
    barred = []
    for start, row in rows:
        sampling = row.spec.sampling
        num_barred = min(sampling.logits.min_tokens - (row.length - row.first_generated), 1 + len(row.drafts))
        if num_barred > 0:
            ends = [*(word[0] for word in sampling.stop_words if len(word) == 1), sampling.termination_id]
            ends = [end for end in ends if 0 <= end < logits.shape[1]]
            barred += [(start + place, end) for place in range(num_barred) for end in ends]
    if barred:
        at = torch.tensor(barred).T.to(logits.device, non_blocking=True)
        logits.index_put_((at[0], at[1]), logits.new_full((), float("-inf")))


def _bar_improbable(rows: _Rows, logits: Tensor) -> None:
    """Bar tokens that are less probable than a share of the most probable one, as `min_p` says."""
    places: list[int] = []
    distances: list[float] = []
    for start, row in rows:
        sampling = row.spec.sampling
        if sampling.logits.min_p > 0 and not sampling.is_greedy:
            width = 1 + len(row.drafts)
            places += range(start, start + width)
            distances += [sampling.temperature * float(np.log(sampling.logits.min_p))] * width
    if places:
        at = torch.tensor(places).to(logits.device, non_blocking=True)
        distance = torch.tensor(distances, dtype=torch.float32).to(logits.device, non_blocking=True)
        found = logits.index_select(0, at)
        least = found.amax(dim=-1, keepdim=True) + distance[:, None]
        logits.index_copy_(0, at, found.masked_fill_(found < least, float("-inf")))
