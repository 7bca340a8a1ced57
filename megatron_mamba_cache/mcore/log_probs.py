"""Log-probabilities of the tokens that follow each computed token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..policy.requests import RunningRequest
from ..state.step_batch import StepBatch


def selected_log_probs(
    step: StepBatch, logits: Tensor, new_tokens: Tensor, only_last: bool
) -> tuple[list[list[float] | None], Tensor]:
    """Return each row's log-probs of its next tokens, and the log-probs of the whole vocabulary.

    A row's last computed token is followed by its sampled token, or in mid-prefill by its next prompt token. A row that
    wants none, or none of this part of its prompt, has None.

    Args:
        logits: [rows, vocab] if only_last, else [tokens or more, vocab].
        new_tokens: [rows] sampled tokens.
    """
    followers = [_follower(row, token) for row, token in zip(step.rows, new_tokens.tolist(), strict=True)]
    targets: list[int] = []
    for row, follower in zip(step.rows, followers, strict=True):
        known = () if only_last else row.tokens(row.computed + 1, row.computed + row.scheduled)
        targets += [*map(int, known), follower]
    log_probs = F.log_softmax(logits[: len(targets)].float(), dim=-1)
    index = torch.tensor(targets, device=logits.device)
    chosen = log_probs.gather(1, index[:, None]).squeeze(1).tolist()
    parts: list[list[float] | None] = []
    for row in step.rows:
        length = 1 if only_last else row.scheduled
        parts.append(chosen[:length] if _is_wanted(row) else None)
        chosen = chosen[length:]
    return parts, log_probs


def top_n_log_probs(step: StepBatch, log_probs: Tensor) -> dict[int, list[tuple[Tensor, Tensor]]] | None:
    """Return, by row index, the best log-probs and their tokens at each position; None if no row wants them.

    Args:
        log_probs: [rows, vocab], or [tokens, vocab] with every row's tokens.
    """
    only_last = log_probs.shape[0] != step.num_tokens
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    start = 0
    for index, row in enumerate(step.rows):
        end = start + (1 if only_last else row.scheduled)
        wish = row.spec.log_probs
        if wish.top_n and _is_wanted(row):
            first = end - 1 if wish.skip_prompt else start
            best = torch.topk(log_probs[first:end], wish.top_n)
            found[index] = list(zip(best.values.cpu(), best.indices.cpu(), strict=True))
        start = end
    return found or None


def _follower(row: RunningRequest, sampled: int) -> int:
    end = row.computed + row.scheduled
    return sampled if row.samples_this_step else int(row.tokens(end, end + 1)[0])


def _is_wanted(row: RunningRequest) -> bool:
    wish = row.spec.log_probs
    return wish.wanted and (row.samples_this_step or not wish.skip_prompt)
