"""Write entries of random bytes to disk."""

import random
from pathlib import Path

from megatron_mamba_cache.policy.tiers.copies import EntryName
from megatron_mamba_cache.tiers.entry_files import (
    EntryForm,
    write_entry,
)

FORM = EntryForm(bytes(range(32)), state_bytes=40, block_bytes=24)
NAME = EntryName(key=2**255 + 7, anchor=3, depth=9, num_blocks=4)


def written(directory: Path, name: EntryName = NAME, form: EntryForm = FORM, seed: int = 0) -> list[bytes]:
    """Write an entry of random bytes; return them, the state first."""
    rng = random.Random(seed)
    sizes = [form.state_bytes, *[form.block_bytes] * name.num_blocks]
    pieces = [rng.randbytes(size) for size in sizes]
    write_entry(directory, name, form, memoryview(pieces[0]), map(memoryview, pieces[1:]))
    return pieces
