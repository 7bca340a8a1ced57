"""Damage a checkpoint directory in one file, and check that it is refused."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face

INDEX = "model.safetensors.index.json"


def copy_of(directory: Path, parent: Path) -> Path:
    """Copy a checkpoint directory into `parent`, and return the copy."""
    return Path(shutil.copytree(directory, parent / "copy"))


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint."""
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def write_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace all tensors of the checkpoint by these tensors, in one file."""
    for file in (*directory.glob("*.safetensors"), *directory.glob(INDEX)):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def write_shards(directory: Path, tensors: Mapping[str, Tensor], num_shards: int = 3) -> None:
    """Replace all tensors of the checkpoint by these tensors, in several files with an index."""
    write_tensors(directory, {})
    (directory / "model.safetensors").unlink()
    names, files = sorted(tensors), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[shard::num_shards]}
        save_file(part, directory / file)
        files |= dict.fromkeys(part, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON object in place."""
    fields = json.loads(path.read_text())
    edit(fields)
    path.write_text(json.dumps(fields))


def set_fields(directory: Path, **fields: Any) -> None:
    """Set fields of a checkpoint's configuration."""
    edit_json(directory / "config.json", lambda config: config.update(fields))


def drop_field(directory: Path, name: str) -> None:
    """Remove a field of a checkpoint's configuration."""
    edit_json(directory / "config.json", lambda config: config.pop(name))


def assert_refused(directory: Path | str, *named: str) -> None:
    """Assert that loading fails with an error that contains all of these texts."""
    with pytest.raises(ValueError) as refusal:
        load_hugging_face(directory, torch.float32)
    for name in named:
        assert name in str(refusal.value)
