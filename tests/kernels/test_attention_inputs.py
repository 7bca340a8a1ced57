"""Heads are normalized and rotated as by Megatron and transformers, and only the given cache slots change.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from megatron_mamba_cache.kernels.attention import attention_inputs
from megatron_mamba_cache.kernels.attention.attention_inputs import write_attention_inputs, write_attention_inputs_ref
from megatron_mamba_cache.kernels.attention.head_changes import HeadChanges, HeadNorms, Rotation
from megatron_mamba_cache.kernels.attention.kv_append import append_kv_ref
from megatron_mamba_cache.kernels.attention.kv_values import FP8, KVScales
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import same_bits

BLOCK, NUM_BLOCKS, NUM_POSITIONS, EPS = 4, 5, 40, 1e-6
SLOTS = [(2, 1), (-1, 0), (0, 3), (4, 0), (-1, 2), (2, 2)]
Op = Callable[..., Tensor]
both_ops = pytest.mark.parametrize("op", [write_attention_inputs, write_attention_inputs_ref])


@dataclass(frozen=True)
class Case:
    """Head sizes, number of rotated channels, and offset of the norms; None: no rotation or no norm."""

    kv_heads: int
    queries: int
    dim: int
    rotated: int | None
    offset: float | None
    dtype: torch.dtype = torch.float32


CASES = [
    Case(2, 8, 256, 64, 1.0, torch.bfloat16),
    Case(2, 8, 256, 64, 1.0),
    Case(4, 3, 128, 64, None, torch.bfloat16),
    Case(4, 3, 64, 64, None),
    Case(1, 1, 20, 6, 0.0),
    Case(3, 2, 24, None, 0.0, torch.bfloat16),
    Case(2, 5, 63, None, 1.0),
    Case(1, 4, 8, 2, None, torch.float16),
    Case(2, 2, 16, 12, 1.0, torch.float64),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@dataclass(frozen=True)
class Inputs:
    """Views of a joint projection [q | gate | k | v] per KV head, with one padding query, and head changes."""

    query: Tensor
    key: Tensor
    value: Tensor
    caches: Tensor
    blocks: Tensor
    offsets: Tensor
    angles: Tensor
    changes: HeadChanges

    def run(self, op: Op) -> Tensor:
        slots = self.blocks, self.offsets
        return op(self.query, self.key, self.value, self.caches[0], self.caches[1], *slots, self.changes)


def inputs_of(case: Case, device: str, slots: list[tuple[int, int]] = SLOTS) -> Inputs:
    torch.manual_seed(5)
    sizes = (case.queries * case.dim, case.queries * case.dim, case.dim, case.dim)
    joint = torch.randn(len(slots) + 1, case.kv_heads, sum(sizes) + 8, device=device).to(case.dtype)
    query, _, key, value = joint[:, :, 8:].split(sizes, dim=-1)
    blocks, offsets = (torch.tensor(part, dtype=torch.int32, device=device) for part in zip(*slots, strict=True))
    positions = torch.randint(NUM_POSITIONS, (len(slots),), device=device)
    half = (case.rotated or 2) // 2
    frequencies = 1.0 / 100.0 ** (torch.arange(half, device=device) / half)
    angles = torch.outer(torch.arange(NUM_POSITIONS, device=device).float() * 3.7, frequencies)
    table = torch.stack((angles.cos(), angles.sin()), dim=1).to(case.dtype)
    weights = torch.randn(2, case.dim, device=device).to(case.dtype)
    changes = HeadChanges(
        None if case.offset is None else HeadNorms(weights[0], weights[1], EPS, case.offset),
        None if case.rotated is None else Rotation(table, positions),
    )
    caches = torch.full((2, NUM_BLOCKS, BLOCK, case.kv_heads, case.dim), float("nan"), device=device).to(case.dtype)
    of_tokens = torch.cat((angles, angles), dim=-1)[positions][:, None, None]  # [tokens, 1, 1, rotated]
    return Inputs(
        query.unflatten(-1, (case.queries, case.dim)), key[:-1], value[:-1], caches, blocks, offsets, of_tokens, changes
    )


def normed(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    """Return the RMS norm of a head as in transformers, multiplied by its factor in fp32 and rounded once."""
    wide = x if x.dtype is torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (offset + weight.to(wide.dtype))).to(x.dtype)


def expected_heads(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return queries [tokens, heads, dim] and keys after norm and rotation as in Megatron."""
    query, key = inputs.query[: len(inputs.key)].flatten(1, 2), inputs.key
    norms = inputs.changes.norms
    if norms is not None:
        query, key = normed(query, norms.query, norms.offset), normed(key, norms.key, norms.offset)
    if inputs.changes.rotation is not None:
        query, key = (_apply_rotary_pos_emb_bshd(x[:, None], inputs.angles)[:, 0] for x in (query, key))
    return query, key


@both_ops
@every_case
def test_attention_heads_are_normalized_rotated_and_written_to_their_slots(case: Case, op: Op, device: str) -> None:
    inputs = inputs_of(case, device)
    before, (queries, keys) = inputs.caches.clone(), expected_heads(inputs)
    is_kernel = op is write_attention_inputs and case.dtype is not torch.float64
    with launches_expected(attention_inputs, "_inputs_kernel", of_kernel=is_kernel, device=device):
        packed = inputs.run(op)
    assert packed.shape == (len(SLOTS) + 1, case.kv_heads * case.queries, case.dim) and packed.is_contiguous()
    written = torch.zeros(NUM_BLOCKS, BLOCK, dtype=torch.bool, device=device)
    found_keys = torch.full_like(keys, float("nan"))
    for token, (block, offset) in enumerate(SLOTS):
        if block >= 0:
            written[block, offset] = True
            found_keys[token] = inputs.caches[0, block, offset]
            assert same_bits(inputs.caches[1, block, offset], inputs.value[token])
    assert same_bits(inputs.caches[:, ~written], before[:, ~written])
    is_cached = inputs.blocks >= 0
    pairs = [(packed[: len(SLOTS)], queries), (found_keys[is_cached], keys[is_cached])]
    if case.offset is None and case.dtype is not torch.float64:
        assert all(same_bits(found, expected) for found, expected in pairs)
    # One value may be rounded differently, before or after the rotation.
    tolerance = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-6, torch.float64: 1e-6}[case.dtype]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@every_case
def test_attention_inputs_of_a_token_are_bitwise_equal_in_any_batch(case: Case, device: str) -> None:
    together = inputs_of(case, device)
    packed = together.run(write_attention_inputs)
    rotation = together.changes.rotation
    for token, (block, offset) in enumerate(SLOTS):
        own = slice(token, token + 1)
        changes = together.changes
        if rotation is not None:
            changes = replace(changes, rotation=replace(rotation, positions=rotation.positions[own]))
        alone = Inputs(
            together.query[own],
            together.key[own],
            together.value[own],
            torch.zeros_like(together.caches),
            together.blocks[own],
            together.offsets[own],
            together.angles[own],
            changes,
        )
        assert same_bits(alone.run(write_attention_inputs), packed[own])
        if block >= 0:
            assert same_bits(alone.caches[:, block, offset], together.caches[:, block, offset])


def test_attention_inputs_keep_the_sign_of_zeros(device: str) -> None:
    inputs = inputs_of(Case(2, 2, 32, 8, None), device)
    inputs.query[:, :, :, 8:].fill_(-0.0)
    packed = inputs.run(write_attention_inputs)
    assert torch.signbit(packed[: len(SLOTS), :, 8:]).all()


def test_keys_and_values_are_cast_to_the_key_dtype_before_the_cache_dtype(device: str) -> None:
    inputs = inputs_of(Case(2, 2, 32, 8, 1.0), device)
    caches = inputs.caches.to(torch.bfloat16)
    inputs.run(write_attention_inputs)
    replace(inputs, caches=caches).run(write_attention_inputs)
    assert same_bits(caches, inputs.caches.to(torch.bfloat16))


def test_attention_input_kernel_accepts_zero_tokens(device: str) -> None:
    inputs = inputs_of(CASES[1], device)
    none = replace(
        inputs, query=inputs.query[:0], key=inputs.key[:0], value=inputs.value[:0], blocks=inputs.blocks[:0],
        offsets=inputs.offsets[:0],
    )  # fmt: skip
    assert none.run(write_attention_inputs).shape == (0, 16, 256) and inputs.caches.isnan().all()


def bad_changes() -> dict[str, tuple[HeadChanges, str]]:
    """Return head changes that must be refused for keys with 8 channels, each with an excerpt of the error message."""
    weights, table = torch.zeros(8), torch.zeros(4, 2, 2)
    positions = torch.zeros(3, dtype=torch.int64)
    return {
        "wrong norm size": (
            HeadChanges(HeadNorms(weights, torch.zeros(4), EPS)),
            r"norm weights must be contiguous with shape \[8\]",
        ),
        "strided norms": (
            HeadChanges(HeadNorms(torch.zeros(16)[::2], weights, EPS)),
            "norm weights must be contiguous",
        ),
        "too many channels": (HeadChanges(rotation=Rotation(torch.zeros(4, 2, 5), positions)), "half between 1 and 4"),
        "wrong table shape": (HeadChanges(rotation=Rotation(torch.zeros(4, 4), positions)), r"\[positions, 2, half\]"),
        "wrong table dtype": (
            HeadChanges(rotation=Rotation(table.bfloat16(), positions)),
            "rotary table must be contiguous torch.float32",
        ),
        "float positions": (
            HeadChanges(rotation=Rotation(table, positions.float())),
            "positions must be contiguous int64",
        ),
        "too few positions": (
            HeadChanges(rotation=Rotation(table, positions[:2])),
            "positions must have 3 or more entries",
        ),
    }


@pytest.mark.parametrize("name", bad_changes())
def test_attention_input_kernel_refuses_mismatched_arguments(name: str) -> None:
    changes, reason = bad_changes()[name]
    slots, caches = torch.zeros(3, dtype=torch.int32), torch.zeros(2, NUM_BLOCKS, BLOCK, 2, 8)
    query, key = torch.zeros(3, 2, 2, 8), torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match=reason):
        write_attention_inputs(query, key, key, caches[0], caches[1], slots, slots, changes)


def test_attention_inputs_use_the_reference_on_a_cpu() -> None:
    if INTERPRETED or torch.cuda.is_available():
        pytest.skip("the kernel runs")
    inputs = inputs_of(CASES[0], "cpu")
    other = replace(inputs, caches=inputs.caches.clone())
    assert same_bits(inputs.run(write_attention_inputs), other.run(write_attention_inputs_ref))
    assert same_bits(inputs.caches, other.caches)


@both_ops
@every_case
def test_fp8_keys_and_values_are_stored_as_by_a_separate_append(op: Op, case: Case, device: str) -> None:
    plain, scales = inputs_of(case, device), KVScales(0.03, 0.7)
    plain.run(op)
    found, expected = (torch.zeros(plain.caches.shape, device=device).to(FP8) for _ in range(2))
    inputs, slots = inputs_of(case, device), (plain.blocks, plain.offsets)
    op(inputs.query, inputs.key, inputs.value, found[0], found[1], *slots, inputs.changes, scales)
    used = [token for token, (block, _) in enumerate(SLOTS) if block >= 0]
    targets = slots[0][used].long(), slots[1][used].long()
    keys, values = (plain.caches[kind][targets] for kind in range(2))
    append_kv_ref(keys, values, expected[0], expected[1], *targets, scales=scales)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)) and expected.view(torch.uint8).any()
