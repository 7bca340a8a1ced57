"""Log-probabilities of the tokens that follow each computed token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..policy.requests import RunningRequest
from ..state.step_batch import StepBatch


def selected_log_probs(
    step: StepBatch, logits: Tensor, new_tokens: Tensor, only_last: bool
) -> tuple[list[list[float]], Tensor]:
    """Return each row's log-probs of its next tokens, and the log-probs of the whole vocabulary.

    A row's last computed token is followed by its sampled token, or in mid-prefill by its next prompt token.

    Args:
        logits: [rows, vocab] if only_last or all rows have one token, else [tokens or more, vocab].
        new_tokens: [rows] sampled tokens.
    """
    followers = [_follower(row, token) for row, token in zip(step.rows, new_tokens.tolist(), strict=True)]
    if only_last:
        lengths, targets = [1] * len(step.rows), followers
    else:
        lengths, targets = [], []
        for row, follower in zip(step.rows, followers, strict=True):
            lengths.append(row.scheduled)
            targets += [*row.tokens(row.computed + 1, row.computed + row.scheduled), follower]
    log_probs = F.log_softmax(logits[: len(targets)].float(), dim=-1)
    index = torch.tensor([int(target) for target in targets], device=logits.device)
    chosen = log_probs.gather(1, index[:, None]).squeeze(1).cpu()
    return [part.tolist() for part in chosen.split(lengths)], log_probs


def _follower(row: RunningRequest, sampled: int) -> int:
    end = row.computed + row.scheduled
    return sampled if row.samples_this_step else int(row.tokens(end, end + 1)[0])
