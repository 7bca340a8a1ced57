"""The keys of the KV blocks that recorded requests fill: those of the prompt, and those of the reply after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from ..policy.block_hashing import TokenIds
from ..policy.identifiers import BlockKey
from .recorded_load import ContentId, RecordedLoad, RecordedRequest

_Content = tuple[ContentId, ...] | tuple[ContentId, int]


@dataclass(frozen=True, slots=True)
class BlockText:
    """The text of a request in KV blocks.

    Args:
        keys: Of its complete blocks, prompt and reply.
        prompt_len, length: Tokens of the prompt, and with the reply.
    """

    keys: Sequence[BlockKey]
    prompt_len: int
    length: int


def block_texts(load: RecordedLoad, block_size: int) -> list[BlockText]:
    """Return the text of each request of a load, in order.

    What a reply says is seen in the next prompt that continues it; a reply that none continues is like no other text.

    Raises:
        ValueError: If blocks and hashes do not fit each other.
    """
    size = load.tokens_per_id
    if block_size % size and size % block_size:
        raise ValueError(f"blocks of {block_size} tokens and hashes of {size} do not fit: one must divide the other")
    known: dict[tuple[BlockKey, _Content], BlockKey] = {}
    numbers = count(1)

    def key_after(parent: BlockKey, content: _Content) -> BlockKey:
        if (key := known.get((parent, content))) is None:
            key = known[parent, content] = BlockKey(next(numbers))
        return key

    def prompt_keys(request: RecordedRequest) -> list[BlockKey]:
        keys: list[BlockKey] = []
        parent = BlockKey(0)
        for block in range(request.prompt_len // block_size):
            parent = key_after(parent, _content(request.content, block, block_size, size))
            keys.append(parent)
        return keys

    prompts = [prompt_keys(request) for request in load.requests]
    following: dict[tuple[BlockKey, _Content], int] = {}  # the next request whose prompt goes on after a block and more
    texts: list[BlockText] = []
    for index in reversed(range(len(prompts))):
        request, keys = load.requests[index], prompts[index]
        # A whole run of tokens may lie behind the last block: a prompt that differs there goes on otherwise.
        rest = request.content[len(keys) * block_size // size : request.prompt_len // size]
        after = following.get((keys[-1], rest)) if keys else None
        reply = [] if after is None else prompts[after][len(keys) :]
        num_blocks = (request.prompt_len + request.reply_len) // block_size
        text = [*keys, *reply][:num_blocks]
        text += [BlockKey(next(numbers)) for _ in range(num_blocks - len(text))]
        texts.append(BlockText(text, request.prompt_len, request.prompt_len + request.reply_len))
        for block, key in enumerate(keys[:-1], 1):
            first = block * block_size // size
            for last in range(first, first + max(block_size // size, 1)):
                following[key, request.content[first:last]] = index
    return texts[::-1]


def _content(ids: tuple[ContentId, ...], block: int, block_size: int, size: int) -> _Content:
    if block_size < size:
        return ids[block * block_size // size], block * block_size % size
    first = block * block_size // size
    return ids[first : first + block_size // size]


class RecordedKeys:
    """A growing text whose keys are known beforehand: the part of `BlockKeyChain` that the cache uses."""

    def __init__(self, text: BlockText, block_size: int) -> None:
        self._text = text
        self._block_size = block_size
        self._num_tokens = text.prompt_len
        self._keys = list(text.keys[: text.prompt_len // block_size])

    @property
    def keys(self) -> list[BlockKey]:
        return self._keys

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def extend(self, tokens: TokenIds) -> None:
        self._num_tokens += len(tokens)
        self._keys += self._text.keys[len(self._keys) : self._num_tokens // self._block_size]
