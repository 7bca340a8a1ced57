"""Compute the tokens that a grammar allows at each position of a reply, in the vocabulary of `PieceTokenizer`."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_mamba_cache.grammars.compiler import Grammars
from tests.grammars.piece_tokenizer import PieceTokenizer


def allowed_tokens(grammar: str, generated: Sequence[int], vocab_size: int) -> Tensor:
    """Return the tokens allowed at each position of a reply, [generated, vocab] bool."""
    grammars = Grammars(vocab_size)
    grammars.read(PieceTokenizer(vocab_size))
    matcher = grammars.matcher(grammar)
    rows = []
    for token in generated:
        mask = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (mask[:, None] >> torch.arange(8)) & 1
        rows.append(bits.flatten()[:vocab_size].bool())
        assert rows[-1][token], (generated, token)
        matcher.consume_token(token)
    return torch.stack(rows)


def tokens_of_mask(mask: bytes, vocab_size: int) -> list[int]:
    """Return the ids of the tokens that a bit mask allows, in ascending order."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits[:vocab_size])]
