"""A checkpoint with wrong files or tensors is refused by name, and nothing of it is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
from tests.models.checkpoint_edits import (
    INDEX,
    assert_refused,
    copy_of,
    edit_json,
    set_fields,
    tensors_of,
    write_tensors,
)
from tests.models.tiny_checkpoints import FAMILIES, tiny_checkpoint


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Write a checkpoint of several shards."""
    case = replace(tiny_checkpoint("nemotron_h-0"), max_shard_size="50KB")
    case.write(case.model(), tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_with_a_missing_tensor_is_refused(family: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    tensors = tensors_of(directory)
    for dropped in tensors:
        write_tensors(directory, {name: tensor for name, tensor in tensors.items() if name != dropped})
        assert_refused(directory, str(directory), f"lacks 1 tensors: {dropped}")


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("family", FAMILIES)
def test_error_for_a_tensor_of_wrong_shape_gives_both_shapes(
    family: str, dim: int, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    tensors = tensors_of(directory)
    for name, tensor in tensors.items():
        grown = torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim)
        write_tensors(directory, tensors | {name: grown})
        with pytest.raises(ValueError) as refusal:
            load_hugging_face(directory, torch.float32)
        found, needed = tuple(grown.shape), tuple(tensor.shape)
        message = f"{directory / 'model.safetensors'}: tensor {name} has shape {found}, but the model needs {needed}, "
        sizes = str(refusal.value).removeprefix(message)
        assert sizes in [
            f"{words} {directory / 'config.json'}" for words in ("according to", "the vocab_size and hidden_size in")
        ]


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_with_an_unknown_tensor_is_refused(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    tensors = tensors_of(directory)
    write_tensors(directory, tensors | {"model.layers.99.mamba.D": torch.ones(4)})
    assert_refused(directory, str(directory), "has 1 tensors: model.layers.99.mamba.D, which the model does not have")
    write_tensors(directory, tensors | {f"extra.{index}": torch.ones(1) for index in range(12)})
    assert_refused(directory, "has 12 tensors: extra.0, ", " and 4 more, ")


@pytest.mark.usefixtures("no_model_is_built")
def test_checkpoint_with_a_missing_shard_is_refused(sharded: Path) -> None:
    for shard in sorted(sharded.glob("*.safetensors")):
        content = shard.read_bytes()
        shard.unlink()
        assert_refused(sharded, f"{shard} is missing")
        shard.write_bytes(content)


@pytest.mark.usefixtures("no_model_is_built")
def test_directory_without_weights_is_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert_refused(sharded, f"{sharded / 'model.safetensors'} is missing")


@pytest.mark.usefixtures("no_model_is_built")
def test_truncated_file_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for length in (0, 1, 7, 8, 9, header - 1, header, header + 1, len(content) // 2, len(content) - 1):
        shard.write_bytes(content[:length])
        assert_refused(sharded, f"{shard} is damaged or incomplete")


@pytest.mark.usefixtures("no_model_is_built")
def test_shard_that_is_not_a_safetensors_file_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[0]
    shard.write_bytes(b"<html>not found</html>" * 50)
    assert_refused(sharded, f"{shard} is damaged or incomplete")


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "{}", "[" * 100_000, '{"weight_map": null}', '{"weight_map": 3}', '{"weight_map": {"a": 3}}'),
        *('{"weight_map": {"a": []}}', '{"weight_map": {"a": "b", "c": null}}', '{"weight_map": {"a": ""}}'),
        *('{"weight_map": {"a": "/etc/passwd"}}', '{"weight_map": {"a": "../model.safetensors"}}'),
    ],
)
def test_damaged_shard_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    assert_refused(sharded, f"{sharded / INDEX} is not an index of safetensors shards")


@pytest.mark.usefixtures("no_model_is_built")
def test_index_that_names_the_wrong_shard_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    moved = next(iter(load_file(second)))
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({moved: first.name}))
    assert_refused(sharded, f"{first} lacks tensor {moved}")


@pytest.mark.usefixtures("no_model_is_built")
def test_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(second).items()))
    save_file(load_file(first) | {name: tensor}, first)
    assert_refused(sharded, f"tensor {name} is in {second} and in {first}; remove one")


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_quantized_tensor_is_refused(dtype: torch.dtype, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_of(checkpoints["bamba"], tmp_path)
    tensors, name = tensors_of(directory), "model.layers.0.feed_forward.up_proj.weight"
    write_tensors(directory, tensors | {name: tensors[name].to(dtype)})
    assert_refused(directory, f"{directory / 'model.safetensors'}: tensor {name} is of type", "not supported")


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("fields", [{"vocab_size": 10**7}, {"hidden_size": 10**7, "mamba_d_head": "auto"}])
def test_wrong_embedding_size_is_refused_before_the_model_is_built(
    fields: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints["bamba"], tmp_path)
    set_fields(directory, **fields)
    where = f"the vocab_size and hidden_size in {directory / 'config.json'}"
    assert_refused(directory, f"{directory / 'model.safetensors'}: tensor model.embed_tokens.weight has shape", where)


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("fields", [{"num_key_value_heads": 3}, {"mamba_n_groups": 3}])
def test_config_that_megatron_cannot_build_is_refused(
    fields: dict[str, int], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints["granite_moe"], tmp_path)
    set_fields(directory, **fields)
    assert_refused(directory, f"{directory / 'config.json'} describes a model that Megatron cannot build: ")
