"""Convert between packed tokens and the padded [rows, max_len] form of a few tokens a row; no host sync."""

import torch
from torch import Tensor

from .decode_rows import DecodeRows
from .prefill_rows import PAD_SLOT


class PackedTokens:
    """The packed positions of decode rows' tokens.

    `inside` [rows, max_len] bool says which of the padded form's tokens are real; those of padded rows are not.
    """

    def __init__(self, rows: DecodeRows) -> None:
        starts, ends = rows.cu_tokens[:-1].to(torch.int64), rows.cu_tokens[1:].to(torch.int64)
        self._positions = starts[:, None] + torch.arange(rows.max_len, device=starts.device)
        self.inside = (self._positions < ends[:, None]) & (rows.columns[:, :1] != PAD_SLOT)

    def gather(self, packed: Tensor) -> Tensor:
        """Return [tokens, ...] as [rows, max_len, ...]; any other token where a row has none."""
        positions = self._positions.clamp_max(packed.shape[0] - 1).flatten()
        return packed.index_select(0, positions).unflatten(0, self.inside.shape)

    def scatter(self, padded: Tensor, like: Tensor) -> Tensor:
        """Return [rows, max_len, ...] as packed tokens of the shape and dtype of `like`, zeros where there is none."""
        num_tokens = like.shape[0]
        packed = like.new_zeros(num_tokens + 1, *like.shape[1:])  # the last takes what is not a token
        targets = torch.where(self.inside, self._positions, num_tokens).flatten()
        packed.index_copy_(0, targets, padded.flatten(0, 1).to(like.dtype))
        return packed[:num_tokens]
