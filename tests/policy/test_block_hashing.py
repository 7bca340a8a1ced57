from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.policy.block_hashing import BlockKeyChain, CacheSalt, block_keys

ROOT = CacheSalt("model", "weights-1", epoch=0).root()
ROOT_HEX = "175be533e83e12d46ef2f0e468e5069bca9501a4e356dec8be8b74129245ae68"
INT32 = st.integers(-(2**31), 2**31 - 1)


def test_four_equal_blocks_have_four_different_keys() -> None:
    assert len(set(block_keys(ROOT, [0] * 4 * 16, 16))) == 4


@pytest.mark.parametrize("num_tokens", [0, 1, 15])
def test_fewer_tokens_than_one_block_have_no_key(num_tokens: int) -> None:
    assert block_keys(ROOT, [7] * num_tokens, 16) == []
    assert block_keys(ROOT, np.full(num_tokens, 7), 16) == []


def test_partial_block_is_never_hashed() -> None:
    chain = BlockKeyChain(ROOT, 4)
    chain.extend([1, 2, 3, 4, 5, 6, 7])
    assert len(chain.keys) == 1
    chain.extend([8])
    assert chain.keys == block_keys(ROOT, [1, 2, 3, 4, 5, 6, 7, 8], 4)


def test_changing_the_first_token_changes_every_block_key() -> None:
    tokens = list(range(64))
    changed = [1000, *tokens[1:]]
    assert not set(block_keys(ROOT, tokens, 16)) & set(block_keys(ROOT, changed, 16))


def test_changing_a_token_keeps_the_keys_of_earlier_blocks() -> None:
    tokens = list(range(64))
    changed = [*tokens[:32], 1000, *tokens[33:]]
    before, after = block_keys(ROOT, tokens, 16), block_keys(ROOT, changed, 16)
    assert before[:2] == after[:2]
    assert before[2] != after[2] and before[3] != after[3]


def test_tokens_that_collide_in_a_polynomial_hash_have_different_keys() -> None:
    tokens = [100] * 32
    keys = {tuple(block_keys(ROOT, tokens, 32))}
    for j in range(31):
        changed = list(tokens)
        changed[j] += 31
        changed[j + 1] -= 1
        keys.add(tuple(block_keys(ROOT, changed, 32)))
    assert len(keys) == 32


def test_block_key_is_the_digest_of_the_previous_key_and_tokens() -> None:
    first = sha256(ROOT + np.array([1, -2], dtype="<i4").tobytes()).digest()
    second = sha256(first + np.array([3, 4], dtype="<i4").tobytes()).digest()
    assert block_keys(ROOT, [1, -2, 3, 4, 5], 2) == [int.from_bytes(first, "big"), int.from_bytes(second, "big")]


@given(st.lists(INT32, max_size=40), st.integers(1, 7), st.data())
def test_block_keys_do_not_depend_on_how_tokens_are_split_between_calls(
    tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    pieces = BlockKeyChain(ROOT, block_size)
    start = 0
    while start < len(tokens):
        end = data.draw(st.integers(start + 1, len(tokens)))
        pieces.extend(np.array(tokens[start:end]) if data.draw(st.booleans()) else tokens[start:end])
        start = end
    one_by_one = BlockKeyChain(ROOT, block_size)
    for token in tokens:
        one_by_one.extend([token])
    whole = block_keys(ROOT, np.array(tokens, dtype=np.int64), block_size)
    assert pieces.keys == one_by_one.keys == whole
    assert len(whole) == len(tokens) // block_size
    assert pieces.num_tokens == one_by_one.num_tokens == len(tokens)


def test_strided_token_array_hashes_like_a_list() -> None:
    tokens = np.arange(64)
    assert block_keys(ROOT, tokens[::2], 8) == block_keys(ROOT, tokens[::2].tolist(), 8)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**40])
def test_hashing_a_token_outside_32_bits_raises_and_changes_nothing(token: int) -> None:
    chain = BlockKeyChain(ROOT, 2)
    chain.extend([1])
    for tokens in ([token, 2, 3], np.array([token, 2, 3])):
        with pytest.raises(ValueError, match="32"):
            chain.extend(tokens)
    assert (chain.num_tokens, chain.keys) == (1, [])
    chain.extend([2])
    assert chain.keys == block_keys(ROOT, [1, 2], 2)


def test_tokens_to_hash_must_be_a_vector_of_integers() -> None:
    for tokens in ([1.5, 2.0], np.array([1.5, 2.0]), np.zeros((2, 2), dtype=np.int64)):
        with pytest.raises(ValueError, match="integer"):
            block_keys(ROOT, tokens, 1)  # type: ignore[arg-type]


def test_every_field_of_the_cache_salt_changes_the_keys() -> None:
    salts = [
        CacheSalt("model", "weights", 0),
        CacheSalt("other", "weights", 0),
        CacheSalt("model", "weights-2", 0),
        CacheSalt("model", "weights", 1),
        CacheSalt("model", "weights", 0, tenant="a"),
        CacheSalt("modelw", "eights", 0),
        CacheSalt("model", "weights0", 0),
        CacheSalt("", "modelweights", 0),
    ]
    assert len({block_keys(salt.root(), [1, 2], 2)[0] for salt in salts}) == len(salts)
    assert {len(salt.root()) for salt in salts} == {32}


def test_cache_salt_has_the_same_hash_in_every_process() -> None:
    # Compare with a literal: a hash that depends on the process would equal itself.
    assert CacheSalt("model", "weights-1", 0).root().hex() == ROOT_HEX


def test_invalid_hash_root_or_block_size_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        BlockKeyChain(b"short", 16)
    with pytest.raises(ValueError, match="block size"):
        BlockKeyChain(ROOT, 0)
