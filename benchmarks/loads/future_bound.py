"""Upper bound on the prompt tokens that a cache of a given size can skip, even if it knows all future requests.

The bound is the optimum of a linear program. Requests run one after another. A prompt consists of blocks, and each
block is identified by all text up to its end, so two requests share a block exactly if they share the text before it.
Let d be the number of leading blocks of request i that earlier requests had. To skip k <= d blocks, the cache needs

- each of these blocks, kept since the last earlier request that had it, and
- a state at the end of block k, kept at least since the last earlier request that had block k. This request also had
  all blocks before block k, so the state is kept at least as long as any of the k
  blocks.

A run is a sequence of blocks that were last used by the same request j. For each run, the program has a variable x in
[0, 1]: the share of the run that is kept for request i. It saves the share's tokens. Between j and i, it takes the
share's bytes, plus 1 / d of a state for each block, which is at most one state per request, because k <= d. The sum of
all kept bytes never exceeds the budget. While a request runs, its blocks and its live state also count.

Every real cache corresponds to a solution, because the program counts no byte that a real cache need not keep:

- A block is kept for its next use only.
- If requests i and i' both count a state at the same time, i' (the later one) counts blocks that i does not have, so
  i' needs another state than i.
- Blocks of a running request count as kept for a later request only after the running request has ended.

The program ignores other limits of real caches, which can only increase the bound: a block is useless without the
blocks before it, states are indivisible and exist only at some positions, slabs hold either KV blocks or states, and
replies take blocks while they are generated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_mamba_cache.planning.plan import BlockText
from megatron_mamba_cache.policy.identifiers import BlockKey


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A run: blocks that a request could skip and that were all last used by the same earlier request.

    Args:
        last, next: Indices of the earlier request and of the request that could skip the blocks.
        num_blocks: Number of blocks in this run.
        num_known: Number of blocks in all runs of the request `next`.
    """

    last: int
    next: int
    num_blocks: int
    num_known: int


def future_bound(texts: Sequence[BlockText], budget: int, block_size: int, block_bytes: int, state_bytes: int) -> float:
    """Return an upper bound on the prompt tokens that any cache of `budget` bytes can skip.

    Raises:
        ImportError: If scipy is not installed.
    """
    own_bytes = [-(-text.prompt_len // block_size) * block_bytes + state_bytes for text in texts]
    runs = kept_runs(texts, [own <= budget for own in own_bytes], block_size)
    if not runs:
        return 0.0
    sizes = [run.num_blocks * (block_bytes + state_bytes / run.num_known) for run in runs]
    room = []  # bytes available while each request runs, and after it
    for own in own_bytes:
        room += [budget - own if own <= budget else budget, budget]
    return block_size * _most_blocks(runs, sizes, room)


def kept_runs(texts: Sequence[BlockText], runs_at_all: Sequence[bool], block_size: int) -> list[KeptRun]:
    """Return the runs of all requests; a request that does not run has none.

    The last prompt token always needs prefill, and the last token of a reply is never processed.
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
    """Solve the linear program. Time 2i is during request i, and time 2i + 1 is after it.

    The kept bytes at each time are also variables. This keeps the constraints sparse: kept(t) = kept(t - 1) + bytes of
    runs that start at t - bytes of runs that ended at t - 1.
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
        raise RuntimeError(f"the linear program must have an optimum, but the solver reports: {solved.message}")
    return float(-solved.fun)
