"""Draft tokens with a multi-token prediction (MTP) head: one pass over known tokens, then one pass per draft token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.attention.interface import AttentionRows
from ...kernels.sampling.greedy_draws import greedy_tokens
from ...mcore.mtp_head import MTPHead, MTPStep
from ...mcore.served_model import logits_of


@dataclass(frozen=True, slots=True)
class MTPBatch:
    """Tokens of one pass, packed by request; see `PackedTokens`."""

    num_tokens: int
    positions: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    attention: AttentionRows
    real_tokens: Tensor | None = None

    @staticmethod
    def of(
        starts: Sequence[int],
        lengths: Sequence[int],
        block_table: npt.NDArray[np.int32],
        block_size: int,
        device: torch.device,
    ) -> "MTPBatch":
        """Return a batch of consecutive tokens of each request.

        Args:
            starts, lengths: Position of each request's first token in the batch, and its number of tokens there.
            block_table: [requests, blocks] KV block ids; each request's must cover its last token.
        """
        cu_query = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int32)
        owners = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(cu_query[-1]) + (np.asarray(starts) - cu_query[:-1])[owners]
        kv_lens = tuple(start + length for start, length in zip(starts, lengths, strict=True))

        def sent(values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

        return MTPBatch(
            num_tokens=int(cu_query[-1]),
            positions=sent(positions, torch.int64),
            token_blocks=sent(block_table[owners, positions // block_size], torch.int32),
            token_offsets=sent(positions % block_size, torch.int32),
            attention=AttentionRows(
                cu_query=sent(cu_query, torch.int32),
                kv_lengths=sent(np.asarray(kv_lens), torch.int32),
                block_table=sent(block_table, torch.int32),
                query_lens=tuple(lengths),
                kv_lens=kv_lens,
                host_block_table=block_table,
                num_decode_requests=len(lengths) if max(lengths) == 1 else 0,
            ),
        )


class MTPChain:
    """A model's MTP head with the embeddings and the output layer of the model.

    Args:
        model: The MambaModel, on a single pipeline stage.
    """

    def __init__(self, model: Any, head: MTPHead) -> None:
        self._model = model
        self._head = head

    def entries(self, token_ids: Tensor, hidden_states: Tensor, step: MTPStep) -> Tensor:
        """Write the entries of a step's tokens; return their outputs, [tokens, hidden].

        Args:
            token_ids: [tokens] int64.
            hidden_states: [tokens, hidden] of the token before each token: after the model's final norm if it was
                verified, of this head if it was drafted, zeros at position 0.
        """
        embeddings = self._model.embedding(input_ids=token_ids.unsqueeze(0), position_ids=step.batch.positions)
        rotary = None
        if self._model.position_embedding_type == "rope":
            rotary = self._model.rotary_pos_emb(step.max_sequence_length)
        return self._head(embeddings.squeeze(1), hidden_states, step, rotary)

    def draft(
        self, token_ids: Tensor, hidden_states: Tensor, num_drafts: int, step_after: Callable[[int], MTPStep]
    ) -> Tensor:
        """Return the most likely next tokens of requests, [requests, num_drafts] int64.

        Entries of drafted tokens are made of drafted hidden states: write them again when the tokens are verified.

        Args:
            token_ids: [requests] newest token of each request.
            hidden_states: [requests, hidden] from which the newest tokens were sampled.
            step_after: Maps a number of drafted tokens to a step of one token for each request, at the position of the
                newest token plus this number.
        """
        drafts = []
        for number in range(num_drafts):
            hidden_states = self.entries(token_ids, hidden_states, step_after(number))
            token_ids = greedy_tokens(logits_of(self._model, hidden_states))
            drafts.append(token_ids)
        return torch.stack(drafts, dim=1) if drafts else token_ids.new_empty(len(token_ids), 0)
