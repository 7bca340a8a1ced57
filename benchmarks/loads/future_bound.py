"""The most prompt tokens that any cache of a size could skip, even with knowledge of the future: a linear program.

Requests run one after another. Each prompt consists of blocks, and a block is the text up to its end, so that requests
share a block exactly if they begin alike. Let request i begin with d blocks that earlier texts have. To skip k <= d of
them it needs

- each of these blocks, kept since the last request before i that had it, and
- a state at the end of the k-th, kept at least since the last request before i that had the k-th block, and so for as
  long as any of the k: a request that has a block has all blocks before it.

The program has a variable x in [0, 1] for the share of a run of blocks that is kept for i from j, the last request
before i that had them. It saves a run's tokens and takes, between j and i, the run's bytes and for each block 1 / d of
a state: at most one state for i in all, as k <= d. The sum of what is kept never exceeds the budget; while a request
runs, its prompt's blocks and its live state are taken from the budget first.

What any cache does is a solution: nothing is counted twice. A block is kept for its next use only. Where i and a later
i' both count for a state at the same moment, i' counts blocks that i does not have, so i' needs a state that is of no
use to i. Blocks that a running request has are not kept for a later one at that moment, but from its end on. And what
the program leaves out only lets it save more: that a later block is useless without those before it, that there are
whole states only, where in a text a cache takes states, slabs, and the blocks of replies while they are generated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_mamba_cache.planning.plan import BlockText
from megatron_mamba_cache.policy.identifiers import BlockKey


@dataclass(frozen=True, slots=True)
class KeptRun:
    """Blocks that a request could skip and that were all last used by the same earlier request.

    Args:
        last, next: Numbers of the two requests.
        num_blocks: Blocks of the run.
        num_known: Blocks that the next request could skip, this run's and others.
    """

    last: int
    next: int
    num_blocks: int
    num_known: int


def future_bound(texts: Sequence[BlockText], budget: int, block_size: int, block_bytes: int, state_bytes: int) -> float:
    """Return the prompt tokens that no cache of `budget` bytes can exceed.

    Raises:
        ImportError: If scipy is missing.
    """
    own_bytes = [-(-text.prompt_len // block_size) * block_bytes + state_bytes for text in texts]
    runs = kept_runs(texts, [own <= budget for own in own_bytes], block_size)
    if not runs:
        return 0.0
    sizes = [run.num_blocks * (block_bytes + state_bytes / run.num_known) for run in runs]
    room = []  # while each request runs, and after it
    for own in own_bytes:
        room += [budget - own if own <= budget else budget, budget]
    return block_size * _most_blocks(runs, sizes, room)


def kept_runs(texts: Sequence[BlockText], runs_at_all: Sequence[bool], block_size: int) -> list[KeptRun]:
    """Return the blocks that each request could skip, by their last user; none for a request that does not run.

    At least one prompt token is computed, and the last token of a reply is not.
    """
    last_of: dict[BlockKey, int] = {}
    kept = []
    for number, text in enumerate(texts):
        if not runs_at_all[number]:
            continue
        lasts: list[int] = []
        for key in text.keys[: (text.prompt_len - 1) // block_size]:
            if key not in last_of:
                break
            lasts.append(last_of[key])
        start = 0
        for end in range(1, len(lasts) + 1):
            if end == len(lasts) or lasts[end] != lasts[start]:
                kept.append(KeptRun(lasts[start], number, end - start, len(lasts)))
                start = end
        for key in text.keys[: (text.length - 1) // block_size]:
            last_of[key] = number
    return kept


def _most_blocks(runs: Sequence[KeptRun], sizes: Sequence[float], room: Sequence[int]) -> float:
    """Solve the program. Moment 2i is during request i, 2i + 1 after it; the bytes kept at each are variables too.

    kept(t) = kept(t - 1) + what begins at t - what ended at t - 1, which has few terms for any length of time.
    """
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    num_runs, num_moments = len(runs), len(room)
    columns, moments = np.arange(num_runs), np.arange(num_moments)
    scale = max(room)  # the solver's tolerances are absolute
    bytes_kept = np.array(sizes) / scale
    begins = np.array([2 * run.last + 1 for run in runs])
    ends = np.array([2 * run.next for run in runs])
    kept = num_runs + moments
    equations = csr_matrix(
        (
            np.concatenate([-bytes_kept, bytes_kept, np.ones(num_moments), -np.ones(num_moments - 1)]),
            (
                np.concatenate([begins, ends, moments, moments[1:]]),
                np.concatenate([columns, columns, kept, kept[:-1]]),
            ),
        ),
        shape=(num_moments, num_runs + num_moments),
    )
    saved = np.concatenate([[-run.num_blocks for run in runs], np.zeros(num_moments)])
    most = np.concatenate([np.ones(num_runs), np.array(room) / scale])
    solved = linprog(
        saved, A_eq=equations, b_eq=np.zeros(num_moments), bounds=np.stack([0 * most, most], axis=1), method="highs"
    )
    if solved.status:
        raise RuntimeError(f"need the optimum of the linear program, found: {solved.message}")
    return float(-solved.fun)
