"""A digest of a model's weights, computed on their device."""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_WORD_BYTES = 8
_WORDS_AT_ONCE = 2**22
_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)


@torch.no_grad()
def weights_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """Return a 32-byte digest of every name, shape, dtype and bit of the tensors, in any order.

    A tensor's bits are summed as 64-bit words, modulo 2**64, each times an odd number derived from its index; twice,
    with two sequences of numbers. A single differing word always shows; other differences are missed once in 2**126
    times.
    """
    whole = hashlib.sha256()
    for name, tensor in sorted(named_tensors, key=lambda pair: pair[0]):
        sums = [_sum_of(tensor, seed) for seed in _SEEDS]
        whole.update(repr((name, tuple(tensor.shape), str(tensor.dtype), sums)).encode())
    return whole.digest()


def _sum_of(tensor: Tensor, seed: int) -> int:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first, words in _words_of(tensor):
        indices = torch.arange(first, first + len(words), dtype=torch.int64, device=words.device)
        total += (words * _scrambled(indices + _signed(seed))).sum()
    return int(total)


def _words_of(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks of a tensor as int64 words, with the number of words before each; the last is zero-padded."""
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = _WORDS_AT_ONCE * _WORD_BYTES
    for first in range(0, octets.numel(), size):
        piece = octets[first : first + size]
        if piece.numel() % _WORD_BYTES or piece.data_ptr() % _WORD_BYTES:
            missing = -piece.numel() % _WORD_BYTES
            piece = torch.cat((piece, piece.new_zeros(missing)))
        yield first // _WORD_BYTES, piece.view(torch.int64)


def _scrambled(numbers: Tensor) -> Tensor:
    """Map each number to an odd one, by multiplications and shifts that spread every bit."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ _shifted(numbers, shift)) * _signed(factor)
    return (numbers ^ _shifted(numbers, 31)) | 1


def _shifted(numbers: Tensor, count: int) -> Tensor:
    """Shift right without the sign."""
    return (numbers >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
