"""Compute a prompt's token ids and block keys in the coordinator, exactly as a replica computes them."""

from array import array
from dataclasses import dataclass
from typing import Any

from ..policy.block_hashing import CacheSalt, block_keys
from ..policy.identifiers import BlockKey


@dataclass(frozen=True, slots=True)
class KeySalt:
    """Values that a replica hashes into every block key, besides the tokens and the tenant."""

    fingerprint: str
    weights_version: str
    epoch: int
    block_size: int

    def root_of(self, tenant: str) -> bytes:
        """Return the digest from which the first block key of each of the tenant's texts is computed."""
        return CacheSalt(self.fingerprint, self.weights_version, self.epoch, tenant).root()


class PromptKeys:
    """Block keys of one prompt, computed once for each distinct salt; usually all replicas have the same salt."""

    def __init__(self, tokens: list[int], tenant: str) -> None:
        self._tokens = tokens
        self._tenant = tenant
        self._keys: dict[KeySalt, list[BlockKey]] = {}

    def under(self, salt: KeySalt) -> list[BlockKey]:
        """Return the keys of the prompt's complete blocks for a replica with this salt."""
        if salt not in self._keys:
            self._keys[salt] = block_keys(salt.root_of(self._tenant), self._tokens, salt.block_size)
        return self._keys[salt]


def prompt_tokens(prompt: Any, tokenizer: Any, add_bos: bool) -> list[int]:
    """Return a prompt's token ids; a text is tokenized in the same way as in the engine.

    Raises:
        ValueError: If the prompt is neither text nor a list of 32-bit integers, or `add_bos` is set but there is no BOS
            token.
    """
    if isinstance(prompt, list):
        if not _are_int32(prompt):
            raise ValueError("a prompt must be text or a list of token ids, which are 32-bit integers")
        return prompt
    if not isinstance(prompt, str):
        raise ValueError(f"a prompt must be text or a list of token ids, found {prompt!r:.100}")
    tokens = list(tokenizer.tokenize(prompt))
    bos = tokenizer.bos
    if add_bos and bos is None:
        raise ValueError("add_BOS is set, but the tokenizer has no BOS token; leave add_BOS out")
    first = next((index for index, token in enumerate(tokens) if token != bos), len(tokens))
    return [*([bos] if add_bos else []), *tokens[first:]]


def _are_int32(tokens: list[Any]) -> bool:
    """Return True if all tokens are 32-bit integers; checked without a Python loop, for speed."""
    if [*map(type, tokens)] != [int] * len(tokens):
        return False
    try:
        array("i", tokens)
    except OverflowError:
        return False
    return True
