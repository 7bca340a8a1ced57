"""A family's tensors load into the same weights under every name that a version of transformers writes."""

import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face, read_sizes
from tests.models.checkpoint_edits import (
    assert_refused,
    copy_of,
    edit_json,
    set_fields,
    tensors_of,
    write_shards,
    write_tensors,
)
from tests.models.served_run import full_sequence_logits
from tests.models.tensor_parallel_worker import assert_same_weights, some_prompts
from tests.models.tiny_checkpoints import FAMILIES, tiny_checkpoint

TOLERANCE = 1e-4
EMBEDDINGS = {"nemotron_h": "backbone.embeddings.weight", "bamba": "model.embed_tokens.weight"}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")

Tensors = Mapping[str, Tensor]
Scheme = Callable[[Tensors], Tensors]


def replacing(*pairs: tuple[str, str]) -> Scheme:
    """Return a naming scheme that replaces parts of tensor names."""

    def renamed(name: str) -> str:
        for part, other in pairs:
            name = name.replace(part, other, 1)
        return name

    return lambda tensors: {renamed(name): tensor for name, tensor in tensors.items()}


def stacking(tensors: Tensors) -> Tensors:
    """Replace the separate expert tensors of each layer by one stacked tensor."""
    found = {name: tensor for name, tensor in tensors.items() if not EXPERT.match(name)}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.match(name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
    assert experts
    return found | {name: torch.stack([each[index] for index in sorted(each)]) for name, each in experts.items()}


NEMOTRON_SCHEMES: dict[str, Scheme] = {
    "backbone.embedding": replacing(("backbone.embeddings.", "backbone.embedding.")),
    "model": replacing(("backbone.", "model.")),
    "model.embedding": replacing(("backbone.embeddings.", "model.embedding."), ("backbone.", "model.")),
    "bare": replacing(("backbone.", "")),
}
GRANITE_EXPERTS = replacing(
    ("moe.input_linear.weight", "moe.experts.gate_up_proj"),
    ("moe.output_linear.weight", "moe.experts.down_proj"),
    ("moe.router.layer.", "moe.router."),
)
IN_A_LARGER_MODEL = replacing(("model.", "model.language_model."))


def packing(tensors: Tensors) -> Tensors:
    """Stack the tensors of a layer's experts like `stacking`, and join the first two projections."""
    stacks = stacking(tensors)
    joined = {
        name: tensor for name, tensor in stacks.items() if not name.endswith(("experts.gate_proj", "experts.up_proj"))
    }
    for name, gate in stacks.items():
        if name.endswith("experts.gate_proj"):
            up = stacks[name.replace("gate_proj", "up_proj")]
            joined[name.replace("gate_proj", "gate_up_proj")] = torch.cat([gate, up], 1)
    return joined


SCHEMES: dict[str, dict[str, Scheme]] = {
    "nemotron_h": NEMOTRON_SCHEMES,
    "nemotron_h_moe": {
        "backbone, stacked": stacking,
        "model, stacked": lambda tensors: stacking(NEMOTRON_SCHEMES["model"](tensors)),
        "bare, stacked": lambda tensors: stacking(NEMOTRON_SCHEMES["bare"](tensors)),
    },
    "bamba": {"bare": replacing(("model.", ""))},
    "granite": {"bare": replacing(("model.", ""))},
    "granite_moe": {
        "experts": GRANITE_EXPERTS,
        "bare": replacing(("model.", "")),
        "bare, experts": lambda tensors: GRANITE_EXPERTS(replacing(("model.", ""))(tensors)),
    },
    "qwen3_next": {"packed": packing, "bare": replacing(("model.", ""))},
    "qwen3_5": {"bare": replacing(("model.", "")), "as transformers 5.3 writes it": IN_A_LARGER_MODEL},
    "qwen3_5_moe": {
        "packed": packing,
        "bare, packed": lambda tensors: packing(replacing(("model.", ""))(tensors)),
        "as transformers 5.3 writes it, packed": lambda tensors: packing(IN_A_LARGER_MODEL(tensors)),
    },
}
CASES = [(family, scheme) for family, schemes in SCHEMES.items() for scheme in schemes]


@pytest.fixture(scope="module")
def usual(checkpoints: dict[str, Path]) -> dict[str, LoadedModel]:
    """Load each family's checkpoint as the installed transformers writes it by default."""
    return {family: load_hugging_face(checkpoints[family], torch.float32) for family in FAMILIES}


def logits_of_transformers(directory: Path, vocab_size: int) -> Tensor:
    """Return the logits of a directory, and assert that transformers found all its tensors."""
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.inference_mode():
        return model.eval()(some_prompts(vocab_size)).logits


def assert_same_logits(loaded: LoadedModel, reference: Path) -> None:
    vocab_size = loaded.architecture.vocab_size
    ours = full_sequence_logits(loaded, some_prompts(vocab_size))
    torch.testing.assert_close(ours, logits_of_transformers(reference, vocab_size), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("write", [write_tensors, write_shards], ids=["one file", "shards"])
@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_every_naming_scheme_gives_the_same_weights(
    family: str,
    scheme: str,
    write: Callable[[Path, Tensors], None],
    checkpoints: dict[str, Path],
    usual: dict[str, LoadedModel],
    tmp_path: Path,
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    tensors = tensors_of(directory)
    renamed = SCHEMES[family][scheme](tensors)
    assert renamed.keys() != tensors.keys()
    write(directory, renamed)
    assert_same_weights(usual[family], load_hugging_face(directory, torch.float32))


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_saved_by_transformers_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    model = tiny_checkpoint(f"{family}-1").model()
    model.save_pretrained(tmp_path, save_original_format=False)
    names = tensors_of(tmp_path).keys()
    assert any(name.startswith("model.") for name in names) and not any(name.startswith("backbone.") for name in names)
    has_experts = family.endswith("_moe") or family == "qwen3_next"
    assert any(name.endswith(".experts.down_proj") for name in names) is has_experts
    assert_same_logits(load_hugging_face(tmp_path, torch.float32), tmp_path)


@pytest.mark.parametrize("family", ["bamba", "granite", "granite_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_tied_model_saved_without_its_output_layer_loads(family: str, tmp_path: Path) -> None:
    case = tiny_checkpoint(f"{family}-0")
    case.config.tie_word_embeddings = True
    case.model().model.save_pretrained(tmp_path)
    assert not any(name.startswith(("model.", "lm_head.")) for name in tensors_of(tmp_path))
    loaded = load_hugging_face(tmp_path, torch.float32)
    assert loaded.architecture.tie_embeddings
    assert_same_logits(loaded, tmp_path)


@pytest.mark.parametrize("family", ["bamba", "granite_moe", "qwen3_5"])
def test_tied_weights_load_under_the_name_of_the_output_layer(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    tensors = tensors_of(directory)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write_tensors(directory, tensors)
    set_fields(directory, tie_word_embeddings=True)
    loaded = load_hugging_face(directory, torch.float32)
    assert loaded.architecture.tie_embeddings
    assert_same_logits(loaded, directory)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["nemotron_h", "granite_moe"])
def test_checkpoint_that_mixes_naming_schemes_loads(
    family: str, seed: int, checkpoints: dict[str, Path], usual: dict[str, LoadedModel], tmp_path: Path
) -> None:
    directory, rng = copy_of(checkpoints[family], tmp_path), random.Random(seed)
    tensors, schemes = tensors_of(directory), [lambda tensors: tensors, *SCHEMES[family].values()]
    mixed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        mixed |= rng.choice(schemes)({name: tensor})
    assert len(mixed) == len(tensors) and 0 < len(mixed.keys() & tensors.keys()) < len(tensors)
    write_tensors(directory, mixed)
    assert_same_weights(usual[family], load_hugging_face(directory, torch.float32))


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize(
    ("family", "end", "renaming"),
    [
        ("nemotron_h", "embeddings.weight", NEMOTRON_SCHEMES["model.embedding"]),
        ("nemotron_h_moe", "experts.0.up_proj.weight", stacking),
        ("bamba", "final_layernorm.weight", SCHEMES["bamba"]["bare"]),
        ("granite_moe", "router.layer.weight", GRANITE_EXPERTS),
        ("qwen3_5_moe", "norm.weight", IN_A_LARGER_MODEL),
        ("qwen3_5_moe", "experts.0.down_proj.weight", packing),
    ],
)
def test_tensor_stored_under_two_names_is_refused(
    family: str, end: str, renaming: Scheme, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    tensors = tensors_of(directory)
    name = next(name for name in tensors if name.endswith(end))
    ((other, tensor),) = renaming({name: tensors[name]}).items()
    write_tensors(directory, tensors | {other: tensor.clone()})
    assert_refused(directory, f"{directory}: the checkpoint has {name} and {other}; remove one of them")


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize(
    ("family", "end", "tried"),
    [
        ("nemotron_h", "norm_f.weight", ["model.norm_f.weight", "norm_f.weight"]),
        ("nemotron_h_moe", "embeddings.weight", ["model.embeddings.weight", "backbone.embedding.weight"]),
        ("nemotron_h_moe", "experts.2.down_proj.weight", ["model.layers.", ".mixer.experts.down_proj"]),
        ("granite_moe", "block_sparse_moe.output_linear.weight", ["block_sparse_moe.experts.down_proj"]),
        ("qwen3_next", "experts.1.up_proj.weight", [".mlp.experts.gate_up_proj"]),
        ("qwen3_5", "linear_attn.in_proj_z.weight", ["model.language_model.layers."]),
    ],
)
def test_error_for_a_missing_tensor_lists_all_names_tried(
    family: str, end: str, tried: list[str], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints[family], tmp_path)
    tensors = tensors_of(directory)
    dropped = next(name for name in tensors if name.endswith(end))
    write_tensors(directory, {name: tensor for name, tensor in tensors.items() if name != dropped})
    assert_refused(directory, f"lacks 1 tensors: {dropped} (the first is also read as ", *tried)


@pytest.mark.usefixtures("no_model_is_built")
def test_error_lists_unknown_and_missing_tensors(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_of(checkpoints["nemotron_h"], tmp_path)
    write_tensors(directory, replacing(("backbone.norm_f", "backbone.last_norm"))(tensors_of(directory)))
    assert_refused(
        directory,
        "has 1 tensors: backbone.last_norm.weight, which the model does not have, and lacks 1 tensors: "
        "backbone.norm_f.weight (the first is also read as model.norm_f.weight, norm_f.weight)",
    )


UNPREFIXED = replacing(("model.", ""))
WRAPPERS: dict[str, tuple[str, str, str, Scheme]] = {
    # family, field of the text configuration, prefix, names below it
    "Nemotron as transformers writes it": ("nemotron_h_moe", "text_config", "language_model.", dict),
    "Nemotron as released": ("nemotron_h", "llm_config", "language_model.", dict),
    "Nemotron, stacked": ("nemotron_h_moe", "text_config", "language_model.", stacking),
    "Granite": ("granite_moe", "text_config", "model.language_model.", replacing(("model.", ""))),
    "Qwen": ("qwen3_5", "text_config", "model.language_model.", replacing(("model.", ""))),
    "Qwen, packed": (
        "qwen3_5_moe",
        "text_config",
        "model.language_model.",
        lambda tensors: packing(UNPREFIXED(tensors)),
    ),
}


def wrap(directory: Path, name: str) -> None:
    """Turn a checkpoint into the language model of a multimodal checkpoint."""
    _, field, prefix, scheme = WRAPPERS[name]
    tensors = {f"{prefix}{name}": tensor for name, tensor in scheme(tensors_of(directory)).items()}
    output = f"{prefix}lm_head.weight"
    if prefix.startswith("model.") and output in tensors:  # the output layer is next to the rest there
        tensors["lm_head.weight"] = tensors.pop(output)
    write_tensors(directory, tensors | {"vision_model.patch.weight": torch.ones(4), "mlp1.0.bias": torch.ones(2)})

    def nest(config: dict[str, Any]) -> None:
        inner = dict(config)
        config.clear()
        config |= {field: inner, "model_type": "some_larger_model", "vision_config": {"hidden_size": 8}}

    edit_json(directory / "config.json", nest)


@pytest.mark.parametrize("name", WRAPPERS)
def test_multimodal_checkpoint_loads_its_language_model_with_a_warning(
    name: str,
    checkpoints: dict[str, Path],
    usual: dict[str, LoadedModel],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    family = WRAPPERS[name][0]
    directory = copy_of(checkpoints[family], tmp_path)
    wrap(directory, name)
    assert read_sizes(directory) == read_sizes(checkpoints[family])
    assert_same_weights(usual[family], load_hugging_face(directory, torch.float32))
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("megatron_mamba_cache")]
    parts = "parts other than the language model, which are not used"
    assert warning == f"{directory} has {parts}; their 2 tensors are left out"


@pytest.mark.usefixtures("no_model_is_built")
def test_unknown_tensors_or_families_in_a_multimodal_checkpoint_are_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints["nemotron_h"], tmp_path)
    wrap(directory, "Nemotron as released")
    extra = "language_model.backbone.layers.99.mixer.D"
    write_tensors(directory, {**load_file(directory / "model.safetensors"), extra: torch.ones(4)})
    assert_refused(directory, f"has 1 tensors: {extra}, which the model does not have")
    edit_json(directory / "config.json", lambda config: config["llm_config"].update(model_type="llama"))
    assert_refused(directory, f"{directory / 'config.json'}: llm_config.model_type='llama' is not supported, only ")


def test_vision_and_mtp_layers_are_skipped_with_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = tiny_checkpoint("qwen3_5_moe_whole-0")
    case.write(case.model(), tmp_path)
    tensors = tensors_of(tmp_path)
    num_of_images = sum(name.startswith("model.visual.") for name in tensors)
    write_tensors(tmp_path, tensors | {"mtp.fc.weight": torch.ones(4), "mtp.norm.weight": torch.ones(4)})
    load_hugging_face(tmp_path, torch.float32)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("megatron_mamba_cache")]
    assert lines == [
        f"{tmp_path} has layers for multi-token prediction (MTP), which are not used; their 2 tensors are left out",
        f"{tmp_path} has parts other than the language model, which are not used; their {num_of_images} tensors are "
        "left out",
    ]
    assert num_of_images > 10


def test_vision_layers_are_skipped_when_config_is_flat(
    checkpoints: dict[str, Path], usual: dict[str, LoadedModel], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints["qwen3_5"], tmp_path)
    tensors = IN_A_LARGER_MODEL(tensors_of(directory))
    write_tensors(directory, {**tensors, "model.visual.patch_embed.proj.bias": torch.ones(4)})
    assert_same_weights(usual["qwen3_5"], load_hugging_face(directory, torch.float32))
    write_tensors(directory, {**tensors, "visuals.bias": torch.ones(4)})
    assert_refused(directory, "has 1 tensors: visuals.bias, which the model does not have")


@pytest.mark.parametrize("inner", [False, None, True])
@pytest.mark.parametrize("outer", [False, None, True])
def test_embeddings_are_tied_when_outer_or_text_config_says_so(
    outer: bool | None, inner: bool | None, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(checkpoints["qwen3_5"], tmp_path)
    wrap(directory, "Qwen")
    tensors = tensors_of(directory)
    write_tensors(directory, {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    edit_json(directory / "config.json", lambda config: config.update(tie_word_embeddings=outer))
    edit_json(directory / "config.json", lambda config: config["text_config"].update(tie_word_embeddings=inner))
    assert read_sizes(directory)[0].tie_embeddings is bool(outer or inner)
    if outer or inner:
        assert load_hugging_face(directory, torch.float32).architecture.tie_embeddings
    else:
        assert_refused(directory, "lacks 1 tensors: language_model.lm_head.weight (the first is also read as ")
    write_tensors(directory, tensors)  # both are there: each is used
    assert not load_hugging_face(directory, torch.float32).architecture.tie_embeddings


def test_tensors_that_are_skipped_may_have_any_dtype(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_of(checkpoints["qwen3_5"], tmp_path)
    tensors, counted = tensors_of(directory), torch.tensor(3)
    others = {"model.visual.norm.num_batches_tracked": counted, "mtp.fc.weight": torch.ones(8, 8).to(torch.float8_e5m2)}
    write_tensors(directory, tensors | others)
    assert_same_weights(load_hugging_face(directory), load_hugging_face(checkpoints["qwen3_5"]))
    write_tensors(directory, tensors | {"norm.num_batches_tracked": counted})
    assert_refused(directory, "tensor norm.num_batches_tracked is of type I64, which is not supported")


def test_missing_tensor_is_named_in_the_checkpoints_naming_scheme(tmp_path: Path) -> None:
    case = tiny_checkpoint("qwen3_5_whole-0")
    case.write(case.model(), tmp_path)
    name = "model.language_model.layers.1.post_attention_layernorm.weight"
    write_tensors(tmp_path, {other: tensor for other, tensor in tensors_of(tmp_path).items() if other != name})
    assert_refused(tmp_path, f"lacks 1 tensors: {name} (the first is also read as language_model.model.layers.1.")
