"""Packed query rows of a step and the location of their cached tokens."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Describe the packed query rows of a step and their cached tokens.

    Args:
        cu_query: [rows + 1] int32; first packed query token of each row.
        kv_lengths: [rows] int32; a row's cached tokens, this step's included. 0 gives zeros.
        block_table: [rows, max_blocks] int32; entries past a row's last block may hold anything.
        query_lens: Host copy of the query lengths.
        kv_lens: Host copy of `kv_lengths`, or upper bounds of it: they size the reads, `kv_lengths` masks them.
        host_block_table: Host copy of `block_table`, valid until the step's results have been read back.
        num_decode_rows: How many rows, the first ones, decode or verify; the others are of prompts.
        last_block_lens: [rows] int32; tokens in each row's last block, of a row without tokens anything. A graph reads
            it; None where nothing is captured.
    """

    cu_query: Tensor
    kv_lengths: Tensor
    block_table: Tensor
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    host_block_table: npt.NDArray[np.int32]
    num_decode_rows: int = 0
    last_block_lens: Tensor | None = None
