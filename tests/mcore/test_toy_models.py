"""A toy recurrence: its slots, its draft states, and planted defects that the random workloads must find."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mamba_cache.policy.tiers.copies import CopyOrder
from megatron_mamba_cache.recurrences import cached_form, moves
from megatron_mamba_cache.recurrences.cached_form import CACHED_FORMS, StoredStates
from megatron_mamba_cache.recurrences.moves import StateMove
from megatron_mamba_cache.tiers import host_memory
from megatron_mamba_cache.tiers.copy_lanes import Piece, UnitSizes
from megatron_mamba_cache.tiers.entry_files import EntryForm
from tests.mcore.checked_restores import checked_restores
from tests.mcore.engine_runs import EngineRun, cache_config, hybrid, tiny_hybrid, tiny_sizes
from tests.mcore.noisy_drafter import NoisyDrafter
from tests.mcore.random_workloads import (
    FLAVOURS,
    TOY_MODELS,
    Arrival,
    Workload,
    make_workload,
    run_workload,
    undisturbed,
)
from tests.mcore.toy_models import ToyHybridConfig, toy_state_bytes
from tests.recurrences.toy import on_cpu

pytestmark = on_cpu
TENSORS = ("inputs", "matrix", "memory", "last", "cells")
"""Tensors of a slot, in the order of its groups."""
NUM_DRAFTS = 4
Plant = Callable[[pytest.MonkeyPatch, Workload], None]


def restored_workload() -> Workload:
    """Return turns of texts with prefixes restored from the host and with log-probs."""
    return replace(make_workload(FLAVOURS["host_tier"], 0, models=TOY_MODELS, has_log_probs=True), disturbed_share=0.0)


def disk_workload() -> Workload:
    """Return turns of texts with prefixes restored from the disk and with log-probs."""
    return replace(make_workload(FLAVOURS["disk_tier"], 1, models=TOY_MODELS, has_log_probs=True), disturbed_share=0.0)


def quantized_workload() -> Workload:
    """Return requests that share prompts, whose cached states are quantized."""
    return make_workload(FLAVOURS["roomy"], 0, models=TOY_MODELS, cached_form="int8")


def drafted_workload() -> Workload:
    """Return pairs of turns; the second resumes at a boundary crossed by accepted drafts of the first."""
    subject = tiny_hybrid(**TOY_MODELS[0])
    block = 2 * subject.sizes.ssm_chunk_size
    config = cache_config(subject.sizes, num_speculative_tokens=NUM_DRAFTS, decode_checkpoints="all")
    rng, requested = random.Random(0), {"return_log_probs": True, "skip_prompt_log_probs": True}
    prompts = [tuple(rng.choices(range(subject.sizes.vocab_size), k=length)) for length in range(block - 8, block)]
    first = [Arrival(0, prompt, block, requested=requested) for prompt in prompts]
    second = [Arrival(0, (1,), 4, follows=request, requested=requested) for request in range(len(prompts))]
    return Workload(subject, config, (*first, *second), has_log_probs=True)


def with_move_of(change: Callable[..., tuple[torch.Tensor, ...]]) -> Plant:
    """Return a defect: an align copy makes another decision."""

    def plant(patch: pytest.MonkeyPatch, _: Workload) -> None:
        decide = moves._decide
        patch.setattr(moves, "_decide", lambda *arguments: change(*decide(*arguments)))

    return plant


def without_move(index: int) -> Plant:
    """Return a defect: an align copy omits a tensor."""

    def plant(patch: pytest.MonkeyPatch, _: Workload) -> None:
        align_copy = cached_form.align_copy

        def partial(wanted: Sequence[StateMove], *arguments: Any) -> None:
            align_copy([move for number, move in enumerate(wanted) if number != index], *arguments)

        patch.setattr(cached_form, "align_copy", partial)

    return plant


def without_restore(index: int) -> Plant:
    """Return a defect: a tensor of a cached state is not written into the live slot."""

    def plant(patch: pytest.MonkeyPatch, _: Workload) -> None:
        restore_to = StoredStates.restore_to

        def partial(stored: StoredStates, live: Sequence[Any], *slots: Any) -> None:
            before = live[index].clone()
            restore_to(stored, live, *slots)
            live[index].copy_(before)

        patch.setattr(StoredStates, "restore_to", partial)

    return plant


def with_short_copies(patch: pytest.MonkeyPatch, work: Workload) -> None:
    """Plant a defect: copies between tiers end before a slot's last tensor."""
    layout = work.subject.shape.cached_layout(work.config.resolved())
    kept = layout.aligned_bytes - layout.parts[-1].num_layers * layout.parts[-1].aligned_bytes
    pieces = UnitSizes.pieces

    def short(sizes: UnitSizes, order: CopyOrder) -> Iterator[Piece]:
        yield from pieces(sizes, replace(order, states=()))
        for source, target in order.states:
            yield Piece(source * sizes.state, target * sizes.state, kept)

    patch.setattr(UnitSizes, "pieces", short)


def with_short_reads(patch: pytest.MonkeyPatch, work: Workload) -> None:
    """Plant a defect: reads from the disk end before a slot's last tensor."""
    layout = work.subject.shape.cached_layout(work.config.resolved())
    kept = layout.aligned_bytes - layout.parts[-1].num_layers * layout.parts[-1].aligned_bytes
    read = host_memory.read_entry

    def short(folder: Path, name: str, form: EntryForm, state: memoryview | None, blocks: Any) -> None:
        before = b"" if state is None else bytes(state[kept:])
        read(folder, name, form, state, blocks)
        if state is not None:
            state[kept:] = before

    patch.setattr(host_memory, "read_entry", short)


DEFECTS = {
    **{f"no align move of {name}": (restored_workload, without_move(i)) for i, name in enumerate(TENSORS)},
    **{f"no restore of {name}": (quantized_workload, without_restore(i)) for i, name in enumerate(TENSORS)},
    "align move of whole tensors from the first column": (
        drafted_workload,
        with_move_of(lambda keeps, window, _, shift: (keeps, window, window, shift)),
    ),
    "align move of windows without the shift": (
        drafted_workload,
        with_move_of(lambda keeps, window, whole, shift: (keeps, window, whole, torch.zeros_like(shift))),
    ),
    "short copies between tiers": (restored_workload, with_short_copies),
    "short reads from the disk": (disk_workload, with_short_reads),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_random_workloads_detect_planted_defects(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, plant = DEFECTS[defect]
    work = make()
    plant(monkeypatch, work)
    with pytest.raises(AssertionError):
        run_checked(work, monkeypatch)


@pytest.mark.parametrize("make", [restored_workload, disk_workload, quantized_workload, drafted_workload])
def test_workloads_pass_without_the_planted_defect(
    make: Callable[[], Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = run_checked(make(), monkeypatch)
    assert seen["prompt_tokens_skipped"] and (make is not restored_workload or seen["prompt_tokens_from_host"])
    assert make is not disk_workload or seen["prompt_tokens_from_disk"]
    assert make is not drafted_workload or seen["accepted_tokens"]


def run_checked(work: Workload, patch: pytest.MonkeyPatch) -> Counter[str]:
    """Run a workload, with checks of restored states if they are quantized; return its counters."""
    drafter = None
    if work.config.num_speculative_tokens:
        texts = run_workload(undisturbed(work)).texts
        drafter = NoisyDrafter(texts, accuracy=1.0, vocab_size=work.subject.sizes.vocab_size)
    with checked_restores(patch) if work.config.quantizes_states else nullcontext():
        return run_workload(work, drafter).seen


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_toy_mixer_matches_the_oracle_over_whole_sequences(layer: int) -> None:
    subject = tiny_hybrid(**TOY_MODELS[0])
    block = subject.model.decoder.layers[layer]
    hidden = torch.randn(20, 2, subject.sizes.hidden_size, generator=torch.Generator().manual_seed(layer))
    with torch.inference_mode():
        mixed, _ = block.mixer(block.norm(hidden))
    for sequence in range(2):
        expected = subject.oracle.layers[layer](hidden[:, sequence].double())
        torch.testing.assert_close(mixed[:, sequence].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("sizes", [tiny_sizes(**model) for model in TOY_MODELS], ids=lambda sizes: sizes.pattern)
def test_state_slot_size_is_the_sum_over_both_layer_types(sizes: ToyHybridConfig, num_drafts: int) -> None:
    shape = hybrid(sizes).shape
    config = cache_config(sizes, num_speculative_tokens=num_drafts).resolved()
    assert shape.state_layout(config).slot_bytes == toy_state_bytes(sizes, num_drafts)
    for form in ("int8", "fp8"):
        layout = CACHED_FORMS[form].layout(shape.state_groups(config), shape.state_layout(config))
        assert layout.slot_bytes == toy_state_bytes(sizes, is_quantized=True)


def test_toy_models_store_one_state_per_draft_and_refuse_replay() -> None:
    subject = tiny_hybrid(**TOY_MODELS[0])
    config = cache_config(subject.sizes, draft_states="auto", num_speculative_tokens=4, max_requests=64)
    assert subject.shape.resolved(config).draft_states == "window"
    with pytest.raises(ValueError, match="not supported for models with toy_matrix, toy_vector layers; set --draft"):
        EngineRun.start(subject, cache_config(subject.sizes, draft_states="replay"))
