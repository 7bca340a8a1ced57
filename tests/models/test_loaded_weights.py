"""What of a checkpoint becomes a model's weights: in which precision, and whose output weights."""

import re
from pathlib import Path

import pytest
import torch

from megatron_mamba_cache.models.hugging_face import load_hugging_face
from tests.models.checkpoint_edits import copy_of, set_fields, tensors_of, write_tensors
from tests.models.tiny_checkpoints import FAMILIES, tiny_checkpoint

OUTPUT = "lm_head.weight"
EMBEDDINGS = {"nemotron_h": "backbone.embeddings.weight", "bamba": "model.embed_tokens.weight"}
FP32_PARAMETERS = re.compile(r"A_log|\.D$|(?<!mixer\.)norm\.weight")
"""What a bf16 model keeps exactly: decay and skip connection of the states, and the norms between layers."""


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_model_has_the_rounded_weights_of_the_fp32_model(family: str, checkpoints: dict[str, Path]) -> None:
    exact = load_hugging_face(checkpoints[family], torch.float32).model
    rounded = dict(load_hugging_face(checkpoints[family], torch.bfloat16).model.named_parameters())
    for name, parameter in exact.named_parameters():
        dtype = torch.float32 if FP32_PARAMETERS.search(name) else torch.bfloat16
        assert rounded[name].dtype is dtype, name
        assert rounded.pop(name).equal(parameter.to(dtype)), name
    assert not rounded


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_checkpoint_loads_exactly_into_an_fp32_model(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    rounded = {name: tensor.bfloat16() for name, tensor in tensors_of(directory).items()}
    write_tensors(directory, rounded)
    from_rounded = load_hugging_face(directory, torch.float32).model.state_dict()
    write_tensors(directory, {name: tensor.float() for name, tensor in rounded.items()})
    for name, tensor in load_hugging_face(directory, torch.float32).model.state_dict().items():
        assert tensor is None or from_rounded[name].equal(tensor), name


@pytest.mark.parametrize("family", EMBEDDINGS)
def test_output_weights_that_a_tied_checkpoint_has_all_the_same_are_used(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    tensors = tensors_of(directory)
    output = tensors[EMBEDDINGS[family]].flip(0)
    write_tensors(directory, tensors | {OUTPUT: output})
    set_fields(directory, tie_word_embeddings=True)
    model = load_hugging_face(directory, torch.float32).model
    assert model.output_layer.weight.cpu().equal(output)
    assert model.embedding.word_embeddings.weight.cpu().equal(tensors[EMBEDDINGS[family]])


def test_nemotron_h_of_transformers_is_never_tied_whatever_its_config_says(tmp_path: Path) -> None:
    case = tiny_checkpoint("nemotron_h-0")
    case.config.tie_word_embeddings = True
    reference = case.model()
    torch.nn.init.normal_(reference.lm_head.weight, std=0.1)
    reference.save_pretrained(tmp_path)
    model = load_hugging_face(tmp_path, torch.float32).model
    assert model.output_layer.weight.cpu().equal(reference.lm_head.weight)
    assert not model.output_layer.weight.equal(model.embedding.word_embeddings.weight)


@pytest.mark.parametrize("family", EMBEDDINGS)
def test_tied_checkpoint_without_output_weights_has_one_matrix_for_both_ends(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    tensors = tensors_of(directory)
    tensors.pop(OUTPUT, None)
    write_tensors(directory, tensors)
    set_fields(directory, tie_word_embeddings=True)
    model = load_hugging_face(directory, torch.float32).model
    assert model.share_embeddings_and_output_weights
    assert model.shared_embedding_or_output_weight().cpu().equal(tensors[EMBEDDINGS[family]])
