"""Log once why no prompt can ever hit the cache."""

import logging

from ..config import CacheConfig

_PROMPTS_BEFORE_A_VERDICT = 8

logger = logging.getLogger(__name__)


class HitRateHint:
    """Watches prompts and logs one line with the reason when no prefix can be reused."""

    def __init__(self, config: CacheConfig) -> None:
        self._block_size = config.block_size_tokens
        self._num_short = 0
        self._is_settled = False
        if not config.prefix_caching:
            self._say("prefix caching is switched off (--no-prefix-caching)")
        elif config.block_size_tokens >= config.max_sequence_length:
            self._say(
                f"the block size of {config.block_size_tokens} tokens is not below max_sequence_length="
                f"{config.max_sequence_length}: lower --inference-dynamic-batching-block-size"
            )

    def note_prompt(self, prompt_len: int) -> None:
        """Count a prompt; one longer than a block settles that hits are possible."""
        if self._is_settled:
            return
        if prompt_len > self._block_size:
            self._is_settled = True
            return
        self._num_short += 1
        if self._num_short == _PROMPTS_BEFORE_A_VERDICT:
            self._say(
                f"the first {self._num_short} prompts are no longer than a block of {self._block_size} tokens: lower "
                "--inference-dynamic-batching-block-size"
            )

    def _say(self, reason: str) -> None:
        self._is_settled = True
        logger.warning("no prompt will find a cached prefix: %s", reason)
