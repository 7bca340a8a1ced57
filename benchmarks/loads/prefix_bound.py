"""Upper bound on the prompt tokens that any cache could have skipped in a served load."""

from collections.abc import Iterator, Sequence

import numpy as np
from loads.open_loop import ServedTurn

from megatron_mamba_cache.policy.block_hashing import CacheSalt, block_keys
from megatron_mamba_cache.policy.identifiers import BlockKey

_ROOT = CacheSalt("prefix bound", "", epoch=0).root()


def skippable_tokens(turns: Sequence[ServedTurn], block_size: int) -> list[int]:
    """Return for each turn the number of prompt tokens that an unlimited cache could have skipped.

    This is the longest common prefix of the prompt and any text known when the turn was admitted, rounded down to whole
    blocks; at least one token needs prefill. Known texts are all prompts that were admitted in earlier steps, and their
    replies so far, except the newest token, which no step has processed yet. For a turn that was never admitted, the
    number is 0.
    """
    known_since: dict[BlockKey, float] = {}
    for turn in turns:
        for key, moment in _blocks(turn, block_size):
            known_since[key] = min(moment, known_since.get(key, float("inf")))
    return [_skippable(turn, known_since, block_size) for turn in turns]


def _blocks(turn: ServedTurn, block_size: int) -> Iterator[tuple[BlockKey, float]]:
    """Yield the blocks of a turn's text, each with the time after which it is known."""
    if turn.admitted is None:
        return
    # Tokens of an unfinished reply were not recorded; no later turn of this load can need them.
    text = np.array([*turn.prompt, *turn.reply[:-1]], dtype=np.int64)
    for number, key in enumerate(block_keys(_ROOT, text, block_size), 1):
        num_generated = number * block_size - len(turn.prompt)
        yield key, turn.admitted if num_generated <= 0 else turn.token_moments[num_generated]


def _skippable(turn: ServedTurn, known_since: dict[BlockKey, float], block_size: int) -> int:
    if turn.admitted is None:
        return 0
    num_blocks = 0
    prompt = np.array(turn.prompt[:-1], dtype=np.int64)
    for key in block_keys(_ROOT, prompt, block_size):
        if not known_since.get(key, float("inf")) < turn.admitted:
            break
        num_blocks += 1
    return num_blocks * block_size
