"""A multi-token prediction head is saved to and loaded from a Megatron checkpoint; one that is damaged is one line."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_mamba_cache.models.checkpoints.checkpoint_writer import InProcessSaveStrategy
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face
from megatron_mamba_cache.models.checkpoints.megatron_checkpoint import (
    load_megatron_checkpoint,
    read_head_pattern,
    save_megatron_checkpoint,
)
from megatron_mamba_cache.models.checkpoints.megatron_head import LAYERS, sharded_head
from tests.models.checkpoint_edits import tensors_of, write_tensors
from tests.models.mtp_heads import head_tensors
from tests.models.test_multi_token_prediction import warnings_of
from tests.models.tiny_checkpoints import tiny_checkpoint
from tests.models.training_checkpoints import FUSED_NORMS

NEMOTRON, QWEN = "nemotron_h_moe-0", "qwen3_5_moe-0"
Parts = dict[str, ShardedTensor]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    """Load models with heads from Hugging Face directories."""
    found = {}
    for name in (NEMOTRON, QWEN):
        case, directory = tiny_checkpoint(name), tmp_path_factory.mktemp(name)
        case.write(case.model(), directory)
        write_tensors(directory, tensors_of(directory) | head_tensors(case.config))
        found[name] = load_hugging_face(directory, torch.float32, mtp="required")
    return found


def save(given: LoadedModel, directory: Path, change: Callable[[Parts], object] = lambda parts: None) -> None:
    """Save a model with its head; `change` may edit the head's tensors, by their stored names."""
    head = sharded_head(given.mtp)  # type: ignore[arg-type]
    parts = {f"{part.key} {part.global_offset}": part for part in head.values()}
    change(parts)
    directory.mkdir()
    dist_checkpointing.save(given.model.sharded_state_dict() | parts, str(directory), InProcessSaveStrategy())


def assert_same_head(one: LoadedModel, other: LoadedModel) -> None:
    assert one.mtp is not None and other.mtp is not None and one.mtp.pattern == other.mtp.pattern
    weights, others = one.mtp.state_dict(), other.mtp.state_dict()  # type: ignore[union-attr]
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert not isinstance(tensor, torch.Tensor) or torch.equal(tensor, others[name]), name


@pytest.mark.parametrize("name", [NEMOTRON, QWEN])
def test_saved_head_loads_bit_identically_if_it_is_asked_for(
    name: str, heads: dict[str, LoadedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = heads[name]
    save_megatron_checkpoint(given.model, given.architecture, tmp_path / "saved", given.mtp)
    assert read_head_pattern(tmp_path / "saved") == "*E"
    for asked in ("auto", "required"):
        assert_same_head(given, load_megatron_checkpoint(tmp_path / "saved", torch.float32, mtp=asked))  # type: ignore[arg-type]
    assert warnings_of(caplog) == []
    assert load_megatron_checkpoint(tmp_path / "saved", torch.float32).mtp is None


def test_head_of_a_training_run_loads(heads: dict[str, LoadedModel], tmp_path: Path) -> None:
    """Transformer Engine stores the norm before a linear layer with that layer."""
    given = heads[NEMOTRON]

    def fuse(parts: Parts) -> None:
        plain, fused = (f"{LAYERS}0.{name}" for name in FUSED_NORMS["*"])
        (part,) = (part for part in parts.values() if part.key == plain)
        part.key = fused

    save(given, tmp_path / "saved", fuse)
    loaded = load_megatron_checkpoint(tmp_path / "saved", torch.float32, given.architecture, "required")
    assert_same_head(given, loaded)


def remove(key: str) -> Callable[[Parts], object]:
    def change(parts: Parts) -> None:
        for name in [name for name, part in parts.items() if part.key == key]:
            del parts[name]

    return change


def add(*keys: str) -> Callable[[Parts], object]:
    def change(parts: Parts) -> None:
        remove(keys[0])(parts)
        parts.update({key: ShardedTensor.from_rank_offsets(key, torch.ones(4)) for key in keys})

    return change


def only(key: str) -> Callable[[Parts], object]:
    def change(parts: Parts) -> None:
        parts.clear()
        add(key)(parts)

    return change


UNSUPPORTED: dict[str, tuple[Callable[[Parts], object], str]] = {
    "none": (lambda parts: parts.clear(), "has no tensors of MTP layers; drafts need another drafter"),
    "several": (add("mtp.layers.1.enorm.weight"), "several MTP layers with weights of their own are not supported"),
    "recurrent": (add(f"{LAYERS}2.mixer.in_proj.weight"), "MTP layers of pattern '*EM' are not supported"),
    "gap": (add(f"{LAYERS}3.mlp.linear_fc1.weight"), "MTP layers of pattern '*E?-' are not supported"),
    "other": (only("mtp.layers.0.transformer_layer.mlp.linear_fc1.weight"), f"not stored as {LAYERS}*"),
}
DAMAGED: dict[str, tuple[Callable[[Parts], object], str]] = {
    "missing": (remove("mtp.layers.0.eh_proj.weight"), "lacks 1 tensors: mtp.layers.0.eh_proj.weight"),
    "shape": (add("mtp.layers.0.enorm.weight"), "tensor mtp.layers.0.enorm.weight has shape (4,)"),
}


def refusal(given: LoadedModel, directory: Path, mtp: Any) -> str:
    with pytest.raises(ValueError) as refused:
        load_megatron_checkpoint(directory, torch.float32, given.architecture, mtp)
    assert "\n" not in str(refused.value) and str(directory) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_head_is_refused_if_required_and_otherwise_left_out(
    name: str, heads: dict[str, LoadedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, message = UNSUPPORTED[name]
    save(heads[NEMOTRON], tmp_path / "saved", change)
    assert message in refusal(heads[NEMOTRON], tmp_path / "saved", "required")
    with caplog.at_level(logging.WARNING):
        loaded = load_megatron_checkpoint(tmp_path / "saved", torch.float32, heads[NEMOTRON].architecture, "auto")
    assert loaded.mtp is None
    assert any(message in warning for warning in warnings_of(caplog)) == (name != "none")


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_head_is_refused(name: str, heads: dict[str, LoadedModel], tmp_path: Path) -> None:
    change, message = DAMAGED[name]
    save(heads[NEMOTRON], tmp_path / "saved", change)
    for asked in ("auto", "required"):
        assert message in refusal(heads[NEMOTRON], tmp_path / "saved", asked)
