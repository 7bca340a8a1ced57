"""Loaded weights: their precision, and the source of the output weights."""

import re
from pathlib import Path

import pytest
import torch
from transformers import NemotronHConfig

from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
from tests.models.checkpoint_edits import copy_of, drop_field, set_fields, tensors_of, write_tensors
from tests.models.served_run import full_sequence_logits
from tests.models.tiny_checkpoints import FAMILIES, MAMBA_FAMILIES, tiny_checkpoint

OUTPUT = "lm_head.weight"
EMBEDDINGS = {
    "nemotron_h": "backbone.embeddings.weight",
    "bamba": "model.embed_tokens.weight",
    "qwen3_5": "model.embed_tokens.weight",
}
FP32_PARAMETERS = re.compile(r"A_log|\.D$")
"""Weights that a bf16 model keeps in fp32: decay and skip connection of the states."""
FP32_PARAMETERS_OF_QWEN = re.compile(r"A_log|dt_bias")


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_model_has_the_cast_weights_of_the_fp32_model(family: str, checkpoints: dict[str, Path]) -> None:
    exact = load_hugging_face(checkpoints[family], torch.float32).model
    bf16 = dict(load_hugging_face(checkpoints[family], torch.bfloat16).model.named_parameters())
    kept = FP32_PARAMETERS if family in MAMBA_FAMILIES else FP32_PARAMETERS_OF_QWEN
    for name, parameter in exact.named_parameters():
        dtype = torch.float32 if kept.search(name) else torch.bfloat16
        assert bf16[name].dtype is dtype, name
        assert bf16.pop(name).equal(parameter.to(dtype)), name
    assert not bf16


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_checkpoint_loads_exactly_into_an_fp32_model(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    bf16 = {name: tensor.bfloat16() for name, tensor in tensors_of(directory).items()}
    write_tensors(directory, bf16)
    from_bf16 = load_hugging_face(directory, torch.float32).model.state_dict()
    write_tensors(directory, {name: tensor.float() for name, tensor in bf16.items()})
    for name, tensor in load_hugging_face(directory, torch.float32).model.state_dict().items():
        assert tensor is None or from_bf16[name].equal(tensor), name


@pytest.mark.parametrize("family", EMBEDDINGS)
def test_stored_output_weights_of_a_tied_checkpoint_are_used(
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


def test_nemotron_h_embeddings_are_untied_as_in_transformers(tmp_path: Path) -> None:
    case = tiny_checkpoint("nemotron_h-0")
    case.config.tie_word_embeddings = True
    reference = case.model()
    torch.nn.init.normal_(reference.lm_head.weight, std=0.1)
    reference.save_pretrained(tmp_path)
    model = load_hugging_face(tmp_path, torch.float32).model
    assert model.output_layer.weight.cpu().equal(reference.lm_head.weight)
    assert not model.output_layer.weight.equal(model.embedding.word_embeddings.weight)


@pytest.mark.parametrize(("family", "head_dim"), [("granite", 24), ("nemotron_h", None)])
def test_attention_head_size_matches_transformers(family: str, head_dim: int | None, tmp_path: Path) -> None:
    case = tiny_checkpoint(f"{family}-0")
    width = head_dim or NemotronHConfig().head_dim
    case.config.head_dim = width
    case.write(model := case.model(), tmp_path)
    if head_dim is None:
        drop_field(tmp_path, "head_dim")
    loaded = load_hugging_face(tmp_path, torch.float32)
    assert loaded.architecture.attention.head_dim == width != case.config.hidden_size // case.config.num_attention_heads
    prompts = torch.randint(case.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(prompts).logits
    torch.testing.assert_close(full_sequence_logits(loaded, prompts), expected, atol=1e-4, rtol=0)


def test_nemotron_h_head_size_is_read_from_its_older_field(tmp_path: Path) -> None:
    case = tiny_checkpoint("nemotron_h-0")
    case.write(case.model(), tmp_path)
    drop_field(tmp_path, "head_dim")
    set_fields(tmp_path, attention_head_dim=case.config.head_dim)
    assert load_hugging_face(tmp_path, torch.float32).architecture.attention.head_dim == case.config.head_dim


@pytest.mark.parametrize("family", EMBEDDINGS)
def test_tied_checkpoint_without_output_weights_shares_one_matrix(
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


def test_negative_multipliers_match_transformers(tmp_path: Path) -> None:
    case = tiny_checkpoint("granite-0")
    case.config.embedding_multiplier, case.config.residual_multiplier, case.config.logits_scaling = -3.0, -0.5, -2.0
    case.write(model := case.model(), tmp_path)
    loaded = load_hugging_face(tmp_path, torch.float32)
    prompts = torch.randint(case.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model(prompts).logits
    torch.testing.assert_close(full_sequence_logits(loaded, prompts), expected, atol=1e-4, rtol=0)
