"""Loading keeps only one checkpoint tensor in memory at a time, for any distribution of tensors over files."""

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_mamba_cache.models.checkpoints import checkpoint_tensors
from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
from tests.models.checkpoint_edits import tensors_of
from tests.models.counting_file import CountingFile
from tests.models.tiny_checkpoints import tiny_checkpoint


@pytest.mark.parametrize("name", ["nemotron_h_moe-0", "bamba-0", "granite_moe-0"])
def test_only_one_tensor_is_in_memory_at_a_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(tiny_checkpoint(name), max_shard_size="50KB")
    case.write(case.model(), tmp_path)
    num_tensors = len(tensors_of(tmp_path))
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    alive: weakref.WeakSet = weakref.WeakSet()
    counts: list[int] = []
    opened = checkpoint_tensors._opened
    monkeypatch.setattr(checkpoint_tensors, "_opened", lambda path: CountingFile(opened(path), alive, counts))
    load_hugging_face(tmp_path, torch.float32)
    assert counts == [0] * num_tensors
