"""Plan the drafts for each step: choose draft lengths, call the drafter, and check its result."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

from torch import Tensor

from ..policy.requests import RunningRequest
from .acceptance import ShadowDrafts
from .all_drafts import AllDrafts
from .draft_policy import DraftPolicy
from .drafter import (
    CapturesGraphs,
    CompilesKernels,
    Draft,
    Drafter,
    DraftRequest,
    DraftsAlone,
    DraftsTogether,
    FollowsSteps,
    HasShortList,
    HasVocabulary,
    ReadsHiddenStates,
    UsesModelMemory,
)
from .prompt_lookup import PromptLookupDrafter

_LOG = logging.getLogger(__name__)
_NO_DRAFT = Draft()
_MOST_SHADOW_DRAFTS = 4
"""Maximum number of shadow drafts that begin in a step of a pause, because a lookup takes time."""


@dataclass(frozen=True, slots=True)
class DraftLimit:
    """A request, and the maximum number of its draft tokens in the next step; 0 for no drafts."""

    request: RunningRequest
    limit: int


class DraftPlanner:
    """Plans the drafts for each step with a drafter and a draft policy.

    Args:
        drafter: Proposes the draft tokens.
        max_drafts: Maximum number of draft tokens per request and step, at least 1; use `NoDrafts` for 0.
        vocab_size: Vocabulary size of the model, and width of the draft distributions.
        policy: Decides how many draft tokens each request gets.
        lookup: Prompt lookup that may draft instead of the drafter; None for the drafter alone.

    Attributes:
        reads_hidden_states: True if `note_hidden_state` must be called.
        uses_blocks: True if the drafter writes drafts into the requests' KV blocks.
        together: The drafter, as far as expert-parallel ranks draft together.

    Raises:
        ValueError: If `max_drafts` or `vocab_size` is below 1, or the drafter has a different vocabulary size.
    """

    def __init__(
        self,
        drafter: Drafter,
        max_drafts: int,
        vocab_size: int,
        policy: DraftPolicy | AllDrafts,
        lookup: PromptLookupDrafter | None = None,
    ) -> None:
        for name, value in (("max_drafts", max_drafts), ("vocab_size", vocab_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}")
        if isinstance(drafter, HasVocabulary) and drafter.vocab_size != vocab_size:
            raise ValueError(
                f"{type(drafter).__name__} drafts from a vocabulary of {drafter.vocab_size} tokens, but the model's "
                f"vocabulary has {vocab_size}; use a draft model with the same vocabulary, padded to the same size"
            )
        self.max_drafts = max_drafts
        self.reads_hidden_states = isinstance(drafter, ReadsHiddenStates)  # cached, because this check is slow
        self.uses_blocks = isinstance(drafter, UsesModelMemory)
        self._drafter = drafter
        self._vocab_size = vocab_size
        self.together = drafter if isinstance(drafter, DraftsTogether) else DraftsAlone()
        self._graphs = drafter if isinstance(drafter, CapturesGraphs) else None
        self._listing = drafter if isinstance(drafter, HasShortList) else None
        self._follower = drafter if isinstance(drafter, FollowsSteps) else None
        self._policy = policy
        self._lookup = lookup
        self._has_looked_up = False  # True if `follower` has looked up requests since the last `decide_next`
        self._offers: list[Draft] = []  # of prompt lookup, for the requests of the step
        self._asked: dict[int, bool] = {}  # requests for which drafts were planned, and whether by prompt lookup
        self._has_followed = False  # True if the drafter drafted for all requests on the device
        self._has_drafts = False  # True if a request in the finished step had drafts of the drafter
        self._shadow_drafts, self._num_failed_shadows, self._turn = ShadowDrafts(), 0, 0
        self._hidden_states: dict[int, Tensor] = {}

    def warmup(self) -> None:
        """Compile the drafter's kernels before the first request."""
        if isinstance(self._drafter, CompilesKernels):
            self._drafter.warmup()

    def capture_if_wanted(self, prepare: Callable[[], None]) -> None:
        """Capture the drafter's CUDA graphs again if it has dropped them; called before each step.

        Args:
            prepare: Called before the capture, during which no other thread may synchronize with the device.
        """
        if self._graphs is None or not self._graphs.wants_graphs:
            return
        prepare()
        try:
            self._graphs.capture()
        except Exception as error:  # a failed capture must not fail the step
            _LOG.warning("%s runs without CUDA graphs: %r", type(self._drafter).__name__, error)

    def check_weights(self) -> None:
        """Drop the drafter's CUDA graphs if its weights have moved to new addresses."""
        if self._graphs is not None:
            self._graphs.check_weights()

    def drop_graphs(self) -> None:
        """Drop the drafter's CUDA graphs."""
        if self._graphs is not None:
            self._graphs.drop_graphs()

    def release_memory(self) -> None:
        """Drop the CUDA graphs of a drafter that uses the model's memory, which is about to be freed."""
        if self.uses_blocks:
            self.drop_graphs()

    def counts(self, requests: Sequence[RunningRequest], max_counts: Sequence[int], budget: int) -> list[int]:
        """Return the number of draft tokens for each request in the next step; see `DraftPolicy.counts`."""
        self._begin()
        if self._lookup is None:
            return self._policy.counts(requests, max_counts, budget)

        def offers(requests: Sequence[RunningRequest], most: Sequence[int]) -> list[int]:
            self._offers = self._looked_up(requests, most)
            return [len(draft.tokens) for draft in self._offers]

        return self._policy.counts(requests, max_counts, budget, offers)

    def decide_next(self, requests: Sequence[RunningRequest]) -> None:
        """Prepare the decision on the draft counts for the next step, while the current step runs.

        Meanwhile, a few requests that do not use prompt lookup are looked up, in turn, for shadow drafts.
        """
        self._policy.decide_next(requests, self.max_drafts)
        has_looked_up, self._has_looked_up = self._has_looked_up, False
        if self._lookup is None or has_looked_up or self._policy.stays_paused(requests):
            return
        for request in self._policy.in_turn(requests):
            if not self._asked.get(request.request_id) and not self._shadow_drafts.num_tokens(request):
                (draft,) = self._lookup.propose([DraftRequest(request, self.max_drafts)])
                self._policy.note_offer(request.request_id, is_found=bool(draft.tokens))
                if draft.tokens:
                    self._shadow_drafts.start(request, draft.tokens)

    def stays_paused(self, requests: Sequence[RunningRequest]) -> bool:
        """Return True if these requests, which have no drafts in this step, will have none in the next either."""
        return self._policy.stays_paused(requests)

    def follower(self, requests: Sequence[RunningRequest]) -> FollowsSteps | None:
        """Return the drafter if it may draft for the next step before the host reads the outcome of the running step.

        It then drafts as many tokens for each request as the request has drafts in the running step, so the policy must
        choose the same numbers again, of drafts by the drafter.
        """
        if self._follower is None or any(self._asked.values()):
            return None  # also if prompt lookup made any of the drafts

        def offers(requests: Sequence[RunningRequest], most: Sequence[int]) -> list[int]:
            found, self._has_looked_up = self._looked_up(requests, most), True
            for request, offer in zip(requests, found, strict=True):
                if offer.tokens and not self._shadow_drafts.num_tokens(request):
                    self._shadow_drafts.start(request, offer.tokens)
            return [len(offer.tokens) for offer in found]

        repeats = self._policy.repeats(requests, self.max_drafts, offers)
        return self._follower if repeats else None

    def note_followed(self, requests: Sequence[RunningRequest]) -> None:
        """Record that the drafter has drafted for these requests on the device; called before their step lands."""
        self._begin()
        self._has_followed = True

    def plan(self, limits: Sequence[DraftLimit]) -> list[Draft]:
        """Return one draft for each request, in order, not longer than its limit.

        Calls the drafter at most once. A failed step may be planned again, because this changes no estimates. With
        prompt lookup, the requests are those of `counts`.

        Raises:
            ValueError: If the drafter's result violates its protocol; the message names the drafter.
        """
        drafts = [Draft()] * len(limits)
        asked = [index for index, entry in enumerate(limits) if entry.limit > 0]
        by_lookup = {index for index in asked if self._offers and self._policy.by_lookup[index]}
        self._asked = {limits[index].request.request_id: index in by_lookup for index in asked}
        for index, (entry, offer) in enumerate(zip(limits, self._offers, strict=False)):
            if index in by_lookup:
                drafts[index] = offer.first(entry.limit)
            elif offer.tokens and not self._shadow_drafts.num_tokens(entry.request):
                self._shadow_drafts.start(entry.request, offer.tokens)
        asked = [index for index in asked if index not in by_lookup]
        if not asked:
            return drafts
        requests = [self._request(limits[index]) for index in asked]
        for index, draft in zip(asked, self._propose(self._drafter, requests), strict=True):
            drafts[index] = draft
        lengths = [len(draft.tokens) for draft in drafts]
        if all(length == entry.limit for length, entry in zip(lengths, limits, strict=True)):
            return drafts
        counts = self._policy.of_proposed([entry.request for entry in limits], lengths)
        return [draft.first(count) for draft, count in zip(drafts, counts, strict=True)]

    def note(self, requests: Sequence[RunningRequest], num_drafted: Sequence[int], num_accepted: Sequence[int]) -> int:
        """Record how many draft tokens of requests were accepted; ignore requests for which none were planned.

        Returns:
            Number of drafts rejected for a token that the drafter's short list lacks; their requests end with it.

        Args:
            num_drafted: [requests] number of verified draft tokens, after any truncation by the caller.
            num_accepted: [requests] number of accepted draft tokens, excluding the base token.
        """
        request_ids = [request.request_id for request in requests]
        kinds = [False] * len(request_ids) if self._has_followed else [*map(self._asked.get, request_ids)]
        if True in kinds or None in kinds or 0 in num_drafted:
            outcomes = [*zip(request_ids, num_drafted, num_accepted, strict=True)]
            for by_lookup in (False, True):
                found = [one for one, kind in zip(outcomes, kinds, strict=True) if kind is by_lookup and one[1]]
                if found:
                    self._policy.note(*zip(*found, strict=True), by_lookup=by_lookup)
                    self._has_drafts |= not by_lookup
        elif kinds:
            self._policy.note(request_ids, num_drafted, num_accepted)
            self._has_drafts = True
        if self._listing is None:
            return 0
        rows = zip(requests, kinds, num_drafted, num_accepted, strict=True)
        ends = [one.generated[-1] for one, kind, drafted, kept in rows if kind is False and kept < drafted]
        return self._listing.num_unlisted(ends) if ends else 0

    def note_step(self, requests: Sequence[RunningRequest]) -> None:
        """Record the end of a step; call it after `note` and after the new tokens are appended to the requests."""
        self._policy.note_step(
            requests, asked=self._has_followed or not all(self._asked.values()), drafted=self._has_drafts
        )
        self._begin()
        if shadowed := self._policy.shadowed(requests):
            self._shadow(shadowed)
        elif self._lookup is None:
            self._shadow_drafts.clear()
        else:
            self._policy.note_shadows(self._shadow_drafts.pop_ended())

    def note_hidden_state(self, request: RunningRequest, state: Tensor) -> None:
        """Store the hidden state [hidden] from which a request's newest token was sampled, for the next draft."""
        self._hidden_states[request.request_id] = state

    def forget(self, request_id: int) -> None:
        """Drop all data about a request that finished or was evicted; an error of the drafter is only logged."""
        self._asked.pop(request_id, None)
        self._shadow_drafts.forget(request_id)
        self._policy.forget(request_id)
        self._hidden_states.pop(request_id, None)
        self._tell_to_forget(request_id)
        if self._lookup is not None:
            self._lookup.forget(request_id)

    def _begin(self) -> None:
        """Start planning the next step, discarding the plan of a failed step."""
        self._asked.clear()
        self._offers = []
        self._has_followed = self._has_drafts = False

    def _tell_to_forget(self, request_id: int) -> None:
        try:
            self._drafter.forget(request_id)
        except Exception as error:  # a drafter is user code, and its errors must not prevent the release
            _LOG.warning("%s cannot forget request %d, and raised %r", type(self._drafter).__name__, request_id, error)

    def _shadow(self, requests: Sequence[RunningRequest]) -> None:
        """Evaluate finished shadow drafts, and start new ones for these paused requests.

        The next step may run meanwhile.
        """
        self._policy.note_shadows(self._shadow_drafts.pop_ended())
        asked = [request for request in requests if self._shadow_drafts.num_tokens(request) == 0]
        if len(asked) > _MOST_SHADOW_DRAFTS:  # the others have their turn after later steps
            self._turn = (self._turn + _MOST_SHADOW_DRAFTS) % len(asked)
            asked = [*asked[self._turn :], *asked[: self._turn]][:_MOST_SHADOW_DRAFTS]
        try:
            wanted = [DraftRequest(request, self.max_drafts) for request in asked]
            drafts = self._propose(self._lookup or self._drafter, wanted) if asked else []
        except Exception as error:  # a drafter is user code, and its errors must not fail a step
            self._note_failed_shadow(asked, error)
            return
        started = [(request, draft.tokens) for request, draft in zip(asked, drafts, strict=True) if draft.tokens]
        for request, tokens in started:
            self._shadow_drafts.start(request, tokens)
        if started:
            self._policy.resume_if_faster(requests, [self._shadow_drafts.num_tokens(request) for request in requests])

    def _looked_up(self, requests: Sequence[RunningRequest], max_counts: Sequence[int]) -> list[Draft]:
        """Return a draft of prompt lookup for each request, no longer than its maximum."""
        assert self._lookup is not None
        wanted = [DraftRequest(*pair) for pair in zip(requests, max_counts, strict=True) if pair[1] > 0]
        found = self._lookup.propose(wanted)
        if len(found) == len(max_counts):
            return found
        drafts = iter(found)
        return [next(drafts) if max_count > 0 else _NO_DRAFT for max_count in max_counts]

    def _note_failed_shadow(self, asked: Sequence[RunningRequest], error: Exception) -> None:
        self._num_failed_shadows += 1
        if self._num_failed_shadows.bit_count() == 1:  # log failures 1, 2, 4, 8, ...
            name = type(self._drafter).__name__
            _LOG.warning("%s failed %d times to make shadow drafts: %r", name, self._num_failed_shadows, error)
        for request in asked:
            self._tell_to_forget(request.request_id)

    def _request(self, limit: DraftLimit) -> DraftRequest:
        return DraftRequest(limit.request, limit.limit, self._hidden_states.get(limit.request.request_id))

    def _propose(self, drafter: Drafter, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = drafter.propose(requests)
        if len(drafts) != len(requests):
            raise self._error(f"{len(drafts)} drafts for {len(requests)} requests")
        if not self._are_valid(requests, drafts):
            for request, draft in zip(requests, drafts, strict=True):
                self._check(request, draft)
        return drafts

    def _are_valid(self, requests: Sequence[DraftRequest], drafts: Sequence[Draft]) -> bool:
        """Return True if a quick check of all drafts together finds no error."""
        tokens = [token for draft in drafts for token in draft.tokens]
        return (
            set(map(type, tokens)) <= {int}
            and (not tokens or (min(tokens) >= 0 and max(tokens) < self._vocab_size))
            and all([len(draft.tokens) <= one.num_tokens for one, draft in zip(requests, drafts, strict=True)])
            and all([draft.distributions is None for draft in drafts])
        )

    def _check(self, request: DraftRequest, draft: Draft) -> None:
        request_id = request.running.request_id
        if len(draft.tokens) > request.num_tokens:
            raise self._error(
                f"{len(draft.tokens)} tokens for request {request_id}, but at most {request.num_tokens} were requested"
            )
        for token in draft.tokens:
            if not isinstance(token, Integral):
                raise self._error(
                    f"{type(token).__name__} {token!r} for request {request_id} as a token, but token ids must be ints"
                )
            if not 0 <= token < self._vocab_size:
                raise self._error(
                    f"token {token} for request {request_id}, but token ids must be in [0, {self._vocab_size})"
                )
        if draft.distributions is None:
            return
        needed, found = (len(draft.tokens), self._vocab_size), tuple(draft.distributions.shape)
        if found != needed:
            raise self._error(
                f"distributions of shape {list(found)} for request {request_id}, but the shape must be {list(needed)}"
            )
        if not draft.distributions.is_floating_point():
            raise self._error(
                f"distributions of dtype {draft.distributions.dtype} for request {request_id}, "
                "but the dtype must be floating-point"
            )

    def _error(self, returned: str) -> ValueError:
        """Return the error for a drafter that returned something invalid."""
        return ValueError(f"drafter {type(self._drafter).__name__} returned {returned}")


class NoDrafts:
    """Null object that an engine without speculative decoding uses instead of `DraftPlanner`."""

    max_drafts, reads_hidden_states, uses_blocks, together = 0, False, False, DraftsAlone()

    def warmup(self) -> None:
        """Do nothing."""

    def capture_if_wanted(self, prepare: Callable[[], None]) -> None:
        """Do nothing."""

    def check_weights(self) -> None:
        """Do nothing."""

    def drop_graphs(self) -> None:
        """Do nothing."""

    def release_memory(self) -> None:
        """Do nothing."""

    def counts(self, requests: Sequence[RunningRequest], max_counts: Sequence[int], budget: int) -> list[int]:
        """Return 0 for each request."""
        return [0] * len(requests)

    def decide_next(self, requests: Sequence[RunningRequest]) -> None:
        """Do nothing."""

    def stays_paused(self, requests: Sequence[RunningRequest]) -> bool:
        """Return True."""
        return True

    def follower(self, requests: Sequence[RunningRequest]) -> None:
        """Return None."""

    def note_followed(self, requests: Sequence[RunningRequest]) -> None:
        """Do nothing."""

    def plan(self, limits: Sequence[DraftLimit]) -> list[Draft]:
        """Return an empty draft for each request."""
        return [Draft()] * len(limits)

    def note(self, requests: Sequence[RunningRequest], num_drafted: Sequence[int], num_accepted: Sequence[int]) -> int:
        """Return 0."""
        return 0

    def note_step(self, requests: Sequence[RunningRequest]) -> None:
        """Do nothing."""

    def note_hidden_state(self, request: RunningRequest, state: Tensor) -> None:
        """Do nothing."""

    def forget(self, request_id: int) -> None:
        """Do nothing."""
