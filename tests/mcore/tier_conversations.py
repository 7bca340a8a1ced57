"""Conversations that outgrow the device's memory, with a host tier and a disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_mamba_cache import CacheConfig
from tests.mcore.engine_runs import (
    EngineRun,
    Hybrid,
    cache_config,
    some_tokens,
    with_host_tier,
    with_one_budget,
)

NUM_TEXTS = 6
PROMPT_LEN = 100
BLOCK = 16


def small_device(subject: Hybrid, *, host_slabs: int = 60, **settings: Any) -> CacheConfig:
    """Return settings with room for one request on the device, and for all texts on the host."""
    limits = {"max_sequence_length": 256, "max_requests": 2}
    config = with_one_budget(cache_config(subject.sizes, **limits, **settings), subject.shape, 1)
    return with_host_tier(config, subject.shape, host_slabs)


def on_disk(config: CacheConfig, directory: Path, **settings: Any) -> CacheConfig:
    """Return the settings with a disk directory below the host."""
    return replace(config, disk_cache_dir=str(directory), disk_cache_gb=0.01, **settings)


class Conversations:
    """Texts that take turns on engines; each turn's prompt continues the reply before."""

    def __init__(self) -> None:
        self.texts = [some_tokens(PROMPT_LEN, seed=number) for number in range(NUM_TEXTS)]
        self._num_requests = 0

    def turn(self, run: EngineRun, **settings: Any) -> list[int]:
        """Run the next turn of each text, with time for its copies; return the skipped tokens of each."""
        skipped = []
        for number, text in enumerate(self.texts):
            request_id = self._num_requests
            self._num_requests += 1
            run.run(request_id, text, 10, **settings)
            run.end_copies()
            skipped.append(run.engine.cached_tokens(request_id))
            self.texts[number] = [*text, *run.tokens(request_id), *some_tokens(5, seed=request_id)]
        return skipped

    @property
    def most(self) -> list[int]:
        """Return the tokens that each text's next turn can skip: all whole computed blocks."""
        return [(len(text) - 6) // BLOCK * BLOCK for text in self.texts]
