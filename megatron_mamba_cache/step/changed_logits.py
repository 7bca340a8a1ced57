"""Logits as requests change them: biases, penalties of tokens that were seen, and tokens that may not be drawn.

Every position of a row, those after its drafts too, is changed by the text before it alone, so that tokens do not
depend on drafts, on the batch or on what was cached.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..policy.logits_settings import LogitsSettings
from ..policy.requests import RunningRequest
from .grammar_masks import GrammarMasks


@dataclass(slots=True, eq=False)
class _SeenTokens:
    """How often a request has generated each token, and which its prompt has.

    Args:
        counts: [vocab] float32.
        in_prompt: [vocab] bool.
        num_counted: Generated tokens that are counted.
    """

    counts: Tensor
    in_prompt: Tensor
    num_counted: int = 0

    def count_up_to(self, row: RunningRequest) -> None:
        """Count the tokens that the row has generated since."""
        first, end = row.first_generated + self.num_counted, row.length
        if first < end:
            new = _on_device(np.asarray(row.tokens(first, end), np.int64), self.counts.device)
            self.counts.index_put_((new,), self.counts.new_ones(()), accumulate=True)
            self.num_counted += end - first


class LogitsChanges:
    """Changes logits before tokens are drawn; keeps what each request with penalties has seen, on the device.

    Args:
        masks: What the grammars of rows allow.
    """

    def __init__(self, masks: GrammarMasks) -> None:
        self.masks = masks
        self._seen: dict[int, _SeenTokens] = {}

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
        for start, row in changed:
            self._change(row, logits[start : start + 1 + len(row.drafts)])
        return logits

    def forget(self, request_id: int) -> None:
        """Forget what a request has seen."""
        self.masks.forget(request_id)
        self._seen.pop(request_id, None)

    def _change(self, row: RunningRequest, logits: Tensor) -> None:
        """Change the logits, [1 + drafts, vocab], of one row, in place."""
        sampling = row.spec.sampling
        settings = sampling.logits
        if settings.logit_bias:
            ids, biases = zip(*settings.logit_bias, strict=True)
            bias = torch.tensor(biases, dtype=torch.float32, device=logits.device)
            logits[:, _on_device(np.asarray(ids, np.int64), logits.device)] += bias
        num_barred = settings.min_tokens - (row.length - row.first_generated)
        ends = [*(word[0] for word in sampling.stop_words if len(word) == 1), sampling.termination_id]
        if num_barred > 0:
            for end in ends:
                if 0 <= end < logits.shape[1]:
                    logits[:num_barred, end] = float("-inf")
        if settings.depends_on_text:
            self._penalise(row, settings, logits)
        if settings.min_p > 0 and not sampling.is_greedy:
            least = logits.amax(dim=-1, keepdim=True) + sampling.temperature * float(np.log(settings.min_p))
            logits.masked_fill_(logits < least, float("-inf"))

    def _penalise(self, row: RunningRequest, settings: LogitsSettings, logits: Tensor) -> None:
        seen = self._seen_by(row, logits)
        counts = seen.counts.repeat(len(logits), 1)  # [1 + drafts, vocab]
        for index, draft in enumerate(row.drafts):
            counts[index + 1 :, draft] += 1
        if settings.repetition_penalty != 1.0:
            penalty = settings.repetition_penalty
            scaled = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(seen.in_prompt | (counts > 0), scaled, logits))
        logits -= settings.frequency_penalty * counts + settings.presence_penalty * (counts > 0)

    def _seen_by(self, row: RunningRequest, logits: Tensor) -> _SeenTokens:
        seen = self._seen.get(row.request_id)
        if seen is None:
            in_prompt = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
            prompt = np.unique(row.spec.prompt[: row.first_generated])
            in_prompt[_on_device(prompt, logits.device)] = True
            seen = self._seen[row.request_id] = _SeenTokens(logits.new_zeros(logits.shape[1]), in_prompt)
        seen.count_up_to(row)
        return seen


def _on_device(ids: "np.ndarray[tuple[int], np.dtype[np.int64]]", device: torch.device) -> Tensor:
    return torch.from_numpy(ids).to(device)
