"""Compute masks of the tokens that grammars allow, in a host thread while the device runs the forward pass.

Drafts are first truncated, on all ranks, at the first token that the grammar rejects. A request then has one mask for
each draft and one for the token after them; each mask assumes that all earlier drafts are accepted.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..grammars.compiler import Grammars
from ..kernels.sampling.logits_changes import mask_tokens
from ..policy.requests import RunningRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher

_TOKENS_A_WORD = 32


class _MatchedRequest:
    """Grammar matcher of a request, and how many generated tokens it has consumed."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self.matcher = matcher
        self._num_taken = 0

    def catch_up(self, request: RunningRequest) -> "LLMatcher":
        """Feed newly generated tokens to the matcher and return it; a mismatch puts it in its failed state."""
        new = request.generated_after(self._num_taken)
        self._num_taken += len(new)
        if new:
            self.matcher.consume_tokens(new)
        return self.matcher


class GrammarMasks:
    """Grammar matchers of running requests, and the token masks for the current step.

    Args:
        samples_here: True if this rank samples tokens. Ranks that do not sample only truncate drafts.
    """

    def __init__(self, grammars: Grammars, *, samples_here: bool = True) -> None:
        self._grammars = grammars
        self._samples_here = samples_here
        self._requests: dict[int, _MatchedRequest] = {}
        self._making: Future[int] | None = None
        self._num_words = -(-grammars.vocab_size // _TOKENS_A_WORD)
        self._masks = torch.empty(0, self._num_words, dtype=torch.int32)
        self._logits_rows = torch.empty(0, dtype=torch.int32)
        self._was_sent: torch.cuda.Event | None = None

    def allowed(self, request: RunningRequest, drafts: Sequence[int]) -> Sequence[int]:
        """Return the drafts before the first one that the request's grammar rejects; all drafts without a grammar."""
        if not request.spec.sampling.grammar or not drafts:
            return drafts
        self._wait()
        matcher = self._matched(request).catch_up(request)
        return drafts[: matcher.validate_tokens(list(map(int, drafts)))]

    def begin(self, requests: Sequence[RunningRequest], starts: Sequence[int]) -> None:
        """Start computing the masks for a step in the background; `apply` waits for them.

        Args:
            starts: [requests] index of each request's first logits row.
        """
        self._wait()
        if self._samples_here:
            found = [
                (request, start)
                for request, start in zip(requests, starts, strict=False)
                if request.spec.sampling.grammar and request.samples_this_step
            ]
            self._making = self._thread.submit(self._make, found) if found else None

    @torch.inference_mode()
    def apply(self, logits: Tensor) -> None:
        """Mask the tokens that the grammars reject, in place, in the logits, [logits, vocab].

        If a request's matcher fails, its logits are not masked, and `Grammars` records the failure.
        """
        making, self._making = self._making, None
        if making is None:
            return
        count = making.result()
        device = logits.device
        masks = self._masks[:count].to(device, non_blocking=True)
        mask_tokens(logits, masks, self._logits_rows[:count].to(device, non_blocking=True))
        if logits.is_cuda:
            self._was_sent = torch.cuda.Event()
            self._was_sent.record(torch.cuda.current_stream(device))

    def forget(self, request_id: int) -> None:
        """Drop the matcher of a request."""
        self._requests.pop(request_id, None)

    def _make(self, requests: Sequence[tuple[RunningRequest, int]]) -> int:
        """Compute the masks for pairs of a request and its first logits row; return the number of masks."""
        if self._was_sent is not None:
            self._was_sent.synchronize()
        count = sum(1 + len(request.drafts) for request, _ in requests)
        if count > len(self._masks):
            self._masks = torch.empty(2 * count, self._num_words, dtype=torch.int32)
            self._logits_rows = torch.empty(2 * count, dtype=torch.int32)
            if torch.cuda.is_available():
                self._masks, self._logits_rows = self._masks.pin_memory(), self._logits_rows.pin_memory()
        self._masks[:count] = -1  # allow all tokens after a drafted end token
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        rows: list[int] = []
        row = 0
        for request, start in requests:
            matcher, width = self._matched(request).catch_up(request), 1 + len(request.drafts)
            rows.append(row)
            if request.drafts:
                drafted.append((matcher, row, list(map(int, request.drafts))))
            else:
                plain.append((matcher, row))
            self._logits_rows[row : row + width] = torch.arange(start, start + width)
            row += width
        target = self._masks.data_ptr(), self._num_words * self._masks.itemsize, count
        if plain:
            self._grammars.executor.unsafe_compute_mask_ptr(plain, *target)
        if drafted:
            self._grammars.executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *target)
        for index, (request, _) in enumerate(requests):
            matcher = self._requests[request.request_id].matcher
            if matcher.is_error():
                self._masks[rows[index] : rows[index] + 1 + len(request.drafts)] = -1
                self._grammars.note_failure(request.request_id, matcher.get_error())
        return count

    def _matched(self, request: RunningRequest) -> _MatchedRequest:
        matched = self._requests.get(request.request_id)
        if matched is None:
            matched = self._requests[request.request_id] = _MatchedRequest(
                self._grammars.matcher(request.spec.sampling.grammar)
            )
        return matched

    def _wait(self) -> None:
        """Wait for the masks of a failed step, because the background thread may still be using the matchers."""
        making, self._making = self._making, None
        if making is not None:
            making.exception()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
