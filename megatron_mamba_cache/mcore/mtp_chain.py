"""A model's multi-token prediction (MTP) head with the embeddings and the output layer of the model."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols
from torch import Tensor

from ..errors import CacheIntegrityError
from ..kernels.attention.interface import AttentionRows
from ..kernels.sampling.greedy_draws import greedy_tokens
from ..recurrences.hidden_states import HIDDEN, previous_in_decode, previous_in_prompts
from ..speculation.short_list import ShortList
from ..step.model import WeightAddresses
from .context import MambaCacheContext
from .model_ends import embeddings_of, logits_of, rotary_of
from .mtp_head import MTPHead, MTPStep


@dataclass(frozen=True, slots=True)
class MTPBatch:
    """Tokens of one pass, packed by request; see `PackedTokens`."""

    num_tokens: int
    positions: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    attention: AttentionRows
    real_tokens: Tensor | None = None

    @property
    def num_exchanged(self) -> int:
        """Number of tokens that each expert-parallel rank exchanges, all of which compute as many."""
        return self.num_tokens


class MTPChain:
    """An MTP head, which is applied again for each further draft.

    Args:
        model: The last pipeline stage of a MambaModel.
        short_list: Tokens that may be drafted; None for the whole vocabulary.
    """

    def __init__(self, model: Any, head: MTPHead, short_list: ShortList | None = None) -> None:
        self._model = model
        self.head = head
        self.short_list = short_list
        self._context: MambaCacheContext | None = None

    def use(self, context: MambaCacheContext) -> None:
        """Use the memory of this context, which must have been built with the shape of the model with its head.

        Another engine may have used the drafter while this one was suspended.

        Raises:
            ValueError: If another engine that has memory uses this head's drafter.
        """
        if self._context is not None and self._context is not context and self._context.is_tensor_state_allocated:
            raise ValueError("the drafter of an MTP head is in use by another engine; make one drafter for each engine")
        self._context = context

    @property
    def context(self) -> MambaCacheContext:
        """The context in use; raises `CacheIntegrityError` without one."""
        if self._context is None:
            raise CacheIntegrityError("an MTP head needs the memory of an engine; give its drafter to build_engine")
        return self._context

    @property
    def kv_cache(self) -> Tensor:
        """Keys and values of the head's layers, which follow those of the model, as in `MTPStep.kv_cache`."""
        context = self.context
        return context.memory.kv_buffer[:, context.shape.layer_types.count(Symbols.ATTENTION) :]

    def write_entries(self) -> None:
        """Write the keys and values of all tokens of the current step, after the forward pass of the model.

        Those of a draft follow from the hidden state of the token before it, as for any other token, so they need not
        be written again if the draft is accepted.
        """
        context = self.context
        step, batch = context.step, context.step.batch
        states, num_decode = context.memory.state_pool.hidden_states, batch.num_decode_tokens
        live, hidden, before = states.live[HIDDEN], step.hidden_states, []
        if batch.decode is not None:
            before.append(previous_in_decode(hidden[:num_decode], live, batch.decode))
        if batch.prefill is not None:
            before.append(previous_in_prompts(hidden[num_decode:], live, batch.prefill, states.cached[HIDDEN]))
        entries = MTPStep(
            batch,
            self.kv_cache,
            step.attend,
            context.max_sequence_length,
            first_prompt=None if batch.prefill is None else num_decode,
        )
        previous = before[0] if len(before) == 1 else torch.cat(before)
        self.head.write_entries(
            self._embeddings_of(batch.token_ids, batch.positions),
            previous,
            entries,
            self.rotary(entries.max_sequence_length),
        )

    def outputs(self, token_ids: Tensor, hidden_states: Tensor, step: MTPStep) -> Tensor:
        """Write the entries of a step's tokens; return their outputs, [tokens, hidden].

        Args:
            token_ids: [tokens] int64.
            hidden_states: [tokens, hidden] of the token before each token: after the model's final norm if it was
                verified, of this head if it was drafted, zeros at position 0.
        """
        embeddings = self._embeddings_of(token_ids, step.batch.positions)
        found: Tensor = self.head(embeddings, hidden_states, step, self.rotary(step.max_sequence_length))
        return found

    def _embeddings_of(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return embeddings_of(self._model if self.head.embedding is None else self.head, token_ids, positions)

    def rotary(self, num_positions: int) -> Tensor | None:
        """Return the model's rotary angles; see `rotary_of`."""
        return rotary_of(self._model, num_positions)

    def most_likely(self, hidden_states: Tensor) -> Tensor:
        """Return the drafts, [n] int64, that follow from hidden states, [n, hidden]."""
        if self.short_list is None:
            return greedy_tokens(logits_of(self._model, hidden_states))
        return self.short_list.most_likely(hidden_states)

    def weight_addresses(self) -> WeightAddresses:
        """Return the addresses of all weights that drafting reads, and of others of the model."""
        return WeightAddresses.of(self._model, self.head)
