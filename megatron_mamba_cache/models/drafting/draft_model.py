"""A drafter that asks a smaller model, whose states it caches as an engine would."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...config import CacheConfig
from ...kernels.sampling.sampling import greedy_tokens, sample_weighted, token_probabilities
from ...mcore.context import MambaCacheContext
from ...mcore.ranks import ranks_of_process
from ...mcore.served_model import check_served, compute_step, wrap_model
from ...mcore.verify_step import logits_on_all_ranks
from ...mcore.warmup import warm_up_prefill
from ...metrics import CacheSnapshot
from ...policy.random_counter import DrawPurpose
from ...policy.requests import RunningRequest
from ...speculation.drafter import Draft, DraftRequest
from .draft_rows import DraftRow, DraftRows


class DraftModelDrafter:
    """Draft the tokens that a draft model would generate: its best for greedy requests, else drawn as the request is.

    It has KV blocks, state slots and a prefix cache of its own, so that prompts of one prefix are prefilled once.
    A call computes what is new of each request's text in one forward, long prompts over several calls, whose drafts are
    empty until then; every draft after the first takes one more forward of all requests together. A rejected draft
    costs nothing: the live state has the verified text only, and drafts go on from it in a slot beside. The drafted
    tokens are read back once a forward.

    Where memory is short a request is drafted for less, or not at all; it never fails for that.

    Args:
        model: Any MambaModel that `build_engine` takes, of the same vocabulary as the engine's model.
        config: Of the draft model's own cache; None takes the defaults. `block_size_tokens` need not be the engine's.
            A state of `prefix_caching_mamba_gb` is in use for each request that is drafted more than one token.
            `num_speculative_tokens` and `decode_checkpoints` mean nothing here.

    Raises:
        ValueError: If the model cannot be served, or the settings do not fit it.
        TypeError: If it is no MambaModel.
    """

    def __init__(self, model: Any, config: CacheConfig | None = None) -> None:
        self._ranks = ranks = ranks_of_process()
        shape = check_served(model, ranks)
        # One state beside the live one: that behind the newest draft.
        config = replace(config or CacheConfig(), num_speculative_tokens=1)
        self._context = MambaCacheContext(config, shape, ranks=ranks)
        self._model = wrap_model(model, self._context)
        self._rows = DraftRows(self._context)

    @property
    def vocab_size(self) -> int:
        """Width of the distributions; padding counts."""
        return self._context.shape.vocab_size

    @torch.inference_mode()
    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each wish, in order; see `Drafter`.

        A draft is empty while the request's prompt is prefilled, where there is no room for it, and where the text is
        the same as in the call before.
        """
        try:
            return self._propose(wishes)
        except BaseException:
            self._rows.abort_round({wish.row.request_id for wish in wishes})
            raise

    def forget(self, request_id: int) -> None:
        """Return what is held of a request; nothing if it is unknown. What was published stays findable."""
        self._rows.forget(request_id)

    def warmup(self) -> None:
        """Compile all that drafting launches; to a draft model every row is a prompt."""
        warm_up_prefill(self._model, self._context)

    def flush(self, weights_version: str | None = None) -> None:
        """Drop all that the draft model knows, because its weights changed; see `MambaCacheContext.flush`."""
        self._rows.drop_all()
        self._context.flush(weights_version)

    def snapshot(self) -> CacheSnapshot:
        """Return counters and what every slot and block of the draft model is used for.

        Of the counters, prefill tokens are the verified ones, decode tokens the drafts that were fed to the model.
        """
        return self._context.snapshot()

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless rows, blocks and slots agree."""
        self._rows.check_integrity()

    def _propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        served = self._rows.schedule(wishes)
        if not served:
            return [Draft()] * len(wishes)
        drawn = self._draw([held.row for held in served])
        self._rows.settle(served)
        limits = {wish.row.request_id: wish.num_tokens for wish in wishes}
        started = {}
        for index, held in enumerate(served):
            row = held.row
            if row.computed == row.length:
                limit = self._rows.room_for_drafts(held, limits[row.request_id])
                started[row.request_id] = unfinished = _UnfinishedDraft(held, limit)
                unfinished.append(drawn, index)
        while growing := [draft for draft in started.values() if len(draft.tokens) < draft.limit]:
            drawn = self._draw([draft.held.branch(draft.tokens) for draft in growing])
            self._context.counters.decode_tokens_computed += len(growing)
            for index, draft in enumerate(growing):
                draft.append(drawn, index)
        self._rows.end_round(served)
        ids = [wish.row.request_id for wish in wishes]
        return [started[request_id].finished() if request_id in started else Draft() for request_id in ids]

    def _draw(self, rows: Sequence[RunningRequest]) -> "_DrawnTokens":
        """Compute scheduled rows and draw the token that follows each; reading it back is the forward's one wait."""
        self._context.lay_out(rows, purpose=DrawPurpose.DRAFT)
        logits = logits_on_all_ranks(self._context, compute_step(self._model, self._context)).squeeze(0)
        settings = self._context.step.batch.logits
        if settings.all_greedy:
            return _DrawnTokens(greedy_tokens(logits).tolist(), None)
        probabilities = token_probabilities(logits, settings.temperature, settings.top_k, settings.top_p)
        return _DrawnTokens(sample_weighted(probabilities, settings.uniforms).tolist(), probabilities)


@dataclass(frozen=True, slots=True)
class _DrawnTokens:
    """The tokens that follow the rows of a forward, and the distributions they were drawn from; None: all greedy."""

    tokens: list[int]
    probabilities: Tensor | None  # [rows, vocab] float64


@dataclass(slots=True)
class _UnfinishedDraft:
    """A draft that grows by a token a forward, up to its limit."""

    held: DraftRow
    limit: int
    tokens: list[int] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)

    def append(self, drawn: _DrawnTokens, index: int) -> None:
        """Take the token of one row of a forward."""
        self.tokens.append(drawn.tokens[index])
        if drawn.probabilities is not None and not self.held.row.spec.sampling.is_greedy:
            self.distributions.append(drawn.probabilities[index])

    def finished(self) -> Draft:
        """Return the draft."""
        return Draft(tuple(self.tokens), torch.stack(self.distributions) if self.distributions else None)
