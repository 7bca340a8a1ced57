"""Tiles of FP8 keys and values of the Hopper kernel, which decodes them in registers, in Gluon.

Threads read codes in the order in which tensor cores take them, up to a permutation of channels, so that no code moves
to another thread: a thread's 16 channels of a key are eight pairs of inputs, and its 16 channels of a value are in 16
columns. A word has four codes.

The bits of a code, moved to those of an fp16 number, mean 2^-8 of its value; NaN is read as 480. To move two codes,
each becomes the low byte of a half whose high byte repeats its sign; the halves are moved up by seven bits, and all but
the signs and the codes are cleared.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..gluon_common import copy_gathered

ROWS_OF_GROUP = gl.constexpr(16)
"""Queries that four warps compute together, each a head of a token: rows of a tensor-core tile."""


@gluon.constexpr_function
def run_of(head_dim):
    """Return how many tokens of a tile are a warp's."""
    return 16 if head_dim > 128 else 32


@gluon.constexpr_function
def _bases(first, last):
    """Return powers of two from `first` up to but not including `last`."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return found


@gluon.constexpr_function
def warps_of(groups):
    """Return the bases of warps over [4 runs of tokens, ...]; the warps of both groups of rows have all elements."""
    return [[0, 0, 0]] * (groups - 1) + [[1, 0, 0], [2, 0, 0]]


@gluon.constexpr_function
def key_layout(run, dim, groups):
    """Words [4, run, dim / 4]: a thread has 16 channels of a token in a row; four threads have 64."""
    registers = [[0, 0, w] for w in [1, 2, *_bases(16, dim // 4)]] + [[0, t, 0] for t in _bases(8, run)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps_of(groups), [], [4, run, dim // 4])


@gluon.constexpr_function
def value_layout(run, dim, groups):
    """Words [4, run, dim / 4]: a thread has 8 or 16 channels of a token in a row; eight threads have 64 or 128."""
    width = min(4, dim // 32)
    words = _bases(1, width) + _bases(8 * width, dim // 4)
    registers = [[0, 0, w] for w in words] + [[0, 1, 0]] + [[0, t, 0] for t in _bases(8, run)]
    lanes = [[0, 2, 0], [0, 4, 0]] + [[0, 0, w * width] for w in (1, 2, 4)]
    return gl.DistributedLinearLayout(registers, lanes, warps_of(groups), [], [4, run, dim // 4])


@gluon.constexpr_function
def counter_layout(size, groups):
    """Every warp has all elements."""
    lanes = [[lane] for lane in _bases(1, 32)]
    return gl.DistributedLinearLayout([[n] for n in _bases(32, size)], lanes, [[0]] * (1 + groups), [], [size])


@gluon.constexpr_function
def result_layout(dim, groups):
    """A thread has the sums of all warps."""
    across = min(32, dim // 8)
    return gl.BlockedLayout([4, 1, 8], [1, 32 // across, across], [1, 4 * groups, 1], [2, 1, 0])


@gluon.jit
def decoded_keys(words, OPERAND: gl.constexpr):
    """Return 2^-8 of keys in fp16, exactly, from their words [4, run, dim / 4]."""
    run: gl.constexpr = words.shape[1]
    dim: gl.constexpr = 4 * words.shape[2]
    first, second, third, fourth = gl.inline_asm_elementwise(
        """{
        .reg .b32 x;
        prmt.b32 x, $4, 0, 0x9180; shl.b32 x, x, 7; and.b32 x, x, 0xBF80BF80; mov.b32 {$0, $1}, x;
        prmt.b32 x, $4, 0, 0xB3A2; shl.b32 x, x, 7; and.b32 x, x, 0xBF80BF80; mov.b32 {$2, $3}, x;
        }""",
        "=h,=h,=h,=h,r",
        [words],
        (gl.float16, gl.float16, gl.float16, gl.float16),
        True,
        1,
    )
    pairs = gl.join(gl.join(first, third), gl.join(second, fourth))  # [..., half of a word, code of a half]
    pairs = pairs.reshape([4, run, dim // 64, 4, 8, 2]).permute([0, 2, 4, 3, 5, 1])
    return gl.convert_layout(pairs.reshape([4, dim, run]), OPERAND, assert_trivial=True)


@gluon.jit
def decoded_values(words, OPERAND: gl.constexpr):
    """Return 2^-8 of values in fp16, exactly, from their words [4, run, dim / 4]; channels in the order of columns."""
    run: gl.constexpr = words.shape[1]
    dim: gl.constexpr = 4 * words.shape[2]
    WIDTH: gl.constexpr = min(16, dim // 8)
    even, odd = words.reshape([4, run // 2, 2, dim // 4]).permute([0, 1, 3, 2]).split()
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        """{
        .reg .b32 x;
        prmt.b32 x, $8, $9, 0xC480; shl.b32 x, x, 7; and.b32 x, x, 0xBF80BF80; mov.b32 {$0, $1}, x;
        prmt.b32 x, $8, $9, 0xD591; shl.b32 x, x, 7; and.b32 x, x, 0xBF80BF80; mov.b32 {$2, $3}, x;
        prmt.b32 x, $8, $9, 0xE6A2; shl.b32 x, x, 7; and.b32 x, x, 0xBF80BF80; mov.b32 {$4, $5}, x;
        prmt.b32 x, $8, $9, 0xF7B3; shl.b32 x, x, 7; and.b32 x, x, 0xBF80BF80; mov.b32 {$6, $7}, x;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [even, odd],
        (gl.float16,) * 8,
        True,
        1,
    )
    low, high = gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h))
    found = gl.join(low, high)  # [4, run / 2, dim / 4, token, channel & 1, channel >> 1 & 1]
    found = found.permute([0, 1, 3, 2, 5, 4]).reshape([4, run, dim // (8 * WIDTH), 8, WIDTH])
    return gl.convert_layout(found.permute([0, 1, 2, 4, 3]).reshape([4, run, dim]), OPERAND, assert_trivial=True)


@gluon.jit
def in_order(sums):
    """Return sums [4, rows, dim] with their columns in the order of channels."""
    rows: gl.constexpr = sums.shape[1]
    dim: gl.constexpr = sums.shape[2]
    WIDTH: gl.constexpr = min(16, dim // 8)
    split = sums.reshape([4, rows, dim // (8 * WIDTH), WIDTH, 8]).permute([0, 1, 2, 4, 3])
    return split.reshape([4, rows, dim])


@gluon.jit
def copy_tile(stage, cache, base, begin, end, STRIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin to copy each warp's tokens from its position `begin`, at `base`, to a stage; zeros from `end` on."""
    OF_WARP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    token = gl.arange(0, stage.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    word = gl.arange(0, stage.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    base = gl.convert_layout(base, OF_WARP)[:, None, None]
    exists = gl.convert_layout(begin, OF_WARP)[:, None, None] + token < end
    copy_gathered(stage, cache + base + (token * STRIDE + word), mask=exists)
    async_copy.commit_group()
