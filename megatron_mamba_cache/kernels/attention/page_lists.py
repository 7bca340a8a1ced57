"""The KV blocks of a step's rows in one list, as libraries with a paged cache read them on the host."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .attention_rows import AttentionRows

ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True)
class PageLists:
    """Rows and their pages; all int32 on the host.

    Args:
        cu_query: [rows + 1]; first packed query token of each row.
        cu_pages: [rows + 1]; where each row's pages begin in `pages`.
        last_page_lens: [rows]; tokens in each row's last page.
    """

    cu_query: Tensor
    cu_pages: Tensor
    pages: Tensor
    last_page_lens: Tensor

    def has_pages_of(self, other: "PageLists") -> bool:
        """Return whether the same rows have the same pages; they may fill them further than the other's."""
        return all(
            mine.equal(theirs)
            for mine, theirs in (
                (self.cu_query, other.cu_query),
                (self.cu_pages, other.cu_pages),
                (self.pages, other.pages),
            )
        )


def page_lists(rows: AttentionRows, block_size: int, part: slice = ALL_ROWS, *, keep_all: bool = False) -> PageLists:
    """Return the pages of some of a step's rows; those without query tokens are left out unless `keep_all`."""
    query_lens, kv_lens = np.array(rows.query_lens[part], np.int32), np.array(rows.kv_lens[part], np.int32)
    table = rows.host_block_table[part]
    if not keep_all:
        used = query_lens > 0
        query_lens, kv_lens, table = query_lens[used], kv_lens[used], table[used]
    num_pages = -(-kv_lens // block_size)
    held = np.arange(table.shape[1]) < num_pages[:, None]
    return PageLists(
        cu_query=_cumulative(query_lens),
        cu_pages=_cumulative(num_pages),
        pages=torch.from_numpy(table[held]),
        last_page_lens=torch.from_numpy(kv_lens - np.maximum(num_pages - 1, 0) * block_size),
    )


def _cumulative(lengths: npt.NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
