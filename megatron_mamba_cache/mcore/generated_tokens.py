"""What a step adds to Megatron's records: a token a request, and before it what accepted drafts add."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor


def has_log_probs(_seconds: float, _sample: Tensor, log_probs: Any, top_n_logprobs: Any = None) -> bool:
    """Whether a step's report, in the order of Megatron's arguments, has more than tokens for any request."""
    return bool(log_probs) or bool(top_n_logprobs)


def append_tokens(
    entries: Mapping[int, Any], request_ids: Sequence[int], seconds: float, sample: Tensor, *_: Any
) -> list[int]:
    """Append the last token of each to requests that all go on, and the step's time; return their ids.

    Args:
        entries: Megatron's, by request id.
        sample: [requests] token ids.
    """
    for request_id, token in zip(request_ids, sample.tolist(), strict=True):
        request = entries[request_id].record.requests[-1]
        request.generated_tokens.append(token)
        if request.tpot is None:
            request.tpot = []
        request.tpot.append(seconds)
    return list(request_ids)


def take_back(request: Any, num_known: int) -> None:
    """Leave a request the first tokens that it generated, and their times."""
    del request.generated_tokens[num_known:]
    if request.tpot is not None:
        del request.tpot[num_known:]


def append_all_but_last(
    step_result: dict[str, Any], request_of: Callable[[int], Any], detokenize: Callable[[list[int]], str]
) -> None:
    """Append what accepted drafts add to their requests; Megatron appends one token a step, the last.

    They take no time of their own: the step's time goes with the last. Their log-probs leave `step_result`, and so do
    all alternatives to tokens behind a request's first. If one has no text, nothing has changed.
    """
    if not step_result["top_n_logprobs"] and max(map(len, step_result["kept_tokens"]), default=0) <= 1:
        return
    log_probs, top_n = step_result["log_probs"], step_result["top_n_logprobs"] or {}
    named = {index: [_named_log_probs(*best, detokenize) for best in places] for index, places in top_n.items()}
    for index, request_id in enumerate(step_result["active_request_ids"].tolist()):
        tokens = step_result["kept_tokens"][index][:-1]
        request = request_of(request_id)
        if request.generated_tokens and index in top_n:
            request.generated_top_n_logprobs = [*(request.generated_top_n_logprobs or ()), *named[index]]
            del top_n[index]
        if not tokens:
            continue
        request.generated_tokens.extend(tokens)
        request.tpot = [*(request.tpot or ()), *(0.0 for _ in tokens)]
        if log_probs and log_probs[index]:
            request.generated_log_probs = [*(request.generated_log_probs or ()), *log_probs[index][:-1]]
            log_probs[index] = log_probs[index][-1:]


def _named_log_probs(values: Tensor, token_ids: Tensor, detokenize: Callable[[list[int]], str]) -> dict[str, float]:
    pairs = zip(values.tolist(), token_ids.tolist(), strict=True)
    return {detokenize([token]): value for value, token in pairs}
