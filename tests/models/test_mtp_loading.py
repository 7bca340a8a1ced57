"""A multi-token prediction head is loaded if it is asked for; one that is damaged or not supported is one line."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.mcore.linear import QuantizableLinear
from megatron_mamba_cache.mcore.stacked_experts import StackedExperts
from megatron_mamba_cache.models.checkpoints.hugging_face import load_hugging_face
from tests.models.checkpoint_edits import copy_of, drop_field, set_fields, tensors_of, write_tensors
from tests.models.mtp_heads import head_tensors
from tests.models.quantized_kinds import KINDS
from tests.models.quantized_writer import quantize
from tests.models.test_multi_token_prediction import warnings_of
from tests.models.tiny_checkpoints import TinyCheckpoint, tiny_checkpoint, wide_checkpoint

NEMOTRON = "nemotron_h_moe-0"
QWEN = "qwen3_5-0"


def written(case: TinyCheckpoint, directory: Path) -> Path:
    """Write a checkpoint with a head."""
    case.write(case.model(), directory)
    write_tensors(directory, tensors_of(directory) | head_tensors(case.config))
    return directory


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write checkpoints with heads, which tests change copies of."""
    return {name: written(tiny_checkpoint(name), tmp_path_factory.mktemp(name)) for name in (NEMOTRON, QWEN)}


def refusal(directory: Path, mtp: str = "auto") -> str:
    """Return the message with which a directory is refused; it must be one line."""
    with pytest.raises(ValueError) as refused:
        load_hugging_face(directory, torch.float32, mtp=mtp)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("name", [NEMOTRON, QWEN])
def test_head_is_skipped_unless_asked_for(
    name: str, directories: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert load_hugging_face(directories[name], torch.float32).mtp is None
    for asked in ("auto", "required"):
        assert load_hugging_face(directories[name], torch.float32, mtp=asked).mtp is not None  # type: ignore[arg-type]
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("name", "prefix"), [(NEMOTRON, "backbone."), (QWEN, "model."), (QWEN, "model.language_model.")]
)
def test_names_may_have_the_models_prefix(name: str, prefix: str, directories: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_of(directories[name], tmp_path)
    renamed = {
        f"{prefix if key.startswith('mtp.') else ''}{key}": value for key, value in tensors_of(directory).items()
    }
    write_tensors(directory, renamed)
    found, usual = (
        load_hugging_face(each, torch.float32, mtp="required").mtp for each in (directory, directories[name])
    )
    assert found is not None and usual is not None
    for mine, theirs in zip(found.parameters(), usual.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_packed_experts_of_a_head_equal_separate_ones(tmp_path: Path) -> None:
    directory = written(tiny_checkpoint("qwen3_5_moe-0"), tmp_path / "separate")
    separate = load_hugging_face(directory, torch.float32, mtp="required").mtp
    tensors, stem = tensors_of(directory), "mtp.layers.0.mlp.experts."
    count = 1 + max(int(name.split(".")[5]) for name in tensors if name.startswith(stem))
    parts = {
        part: [tensors.pop(f"{stem}{expert}.{part}_proj.weight") for expert in range(count)]
        for part in ("gate", "up", "down")
    }
    tensors[f"{stem}gate_up_proj"] = torch.stack(
        [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
    )
    tensors[f"{stem}down_proj"] = torch.stack(parts["down"])
    write_tensors(directory, tensors)
    packed = load_hugging_face(directory, torch.float32, mtp="required").mtp
    assert packed is not None and separate is not None
    for mine, theirs in zip(packed.parameters(), separate.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_named_layers_without_tensors_are_reported_once_and_refused_if_required(
    directories: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of(directories[QWEN], tmp_path)
    write_tensors(
        directory, {name: each for name, each in tensors_of(directory).items() if not name.startswith("mtp.")}
    )
    set_fields(directory, mtp_num_hidden_layers=1)
    assert load_hugging_face(directory, torch.float32, mtp="auto").mtp is None
    (warning,) = warnings_of(caplog)
    assert warning == refusal(directory, "required")
    assert "config.json: it names MTP layers, but the files have no tensors of them" in warning
    drop_field(directory, "mtp_num_hidden_layers")
    caplog.clear()
    assert load_hugging_face(directory, torch.float32, mtp="auto").mtp is None
    assert warnings_of(caplog) == []
    assert "the model has no MTP layers" in refusal(directory, "required")


UNSUPPORTED: dict[str, tuple[str, dict[str, object], str]] = {
    "recurrent": (NEMOTRON, {"mtp_hybrid_override_pattern": "*ME"}, "'*ME' are not supported"),
    "no attention": (NEMOTRON, {"mtp_hybrid_override_pattern": "E"}, "'E' are not supported"),
    "recurrent, listed": (NEMOTRON, {"mtp_layers_block_type": ["mamba", "full_attention"]}, "'M*' are not supported"),
    "two of them": (NEMOTRON, {"mtp_hybrid_override_pattern": "*E/*E"}, "'*E/*E' are not supported"),
    "own embeddings": (QWEN, {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_head_is_refused_if_required_and_otherwise_left_out(
    name: str, directories: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, fields, message = UNSUPPORTED[name]
    directory = copy_of(directories[model], tmp_path)
    set_fields(directory, **fields)
    found = refusal(directory, "required")
    assert message in found
    assert load_hugging_face(directory, torch.float32, mtp="auto").mtp is None
    assert warnings_of(caplog) == [found]


def test_head_with_experts_of_a_dense_model_is_refused(tmp_path: Path) -> None:
    directory = written(tiny_checkpoint("nemotron_h-0"), tmp_path)
    set_fields(directory, mtp_hybrid_override_pattern="*E")
    assert "MTP layers of pattern '*E' have experts (E), but the model has none" in refusal(directory, "required")


def test_unknown_value_is_refused(directories: dict[str, Path]) -> None:
    assert refusal(directories[QWEN], "yes") == "mtp must be 'none', 'auto' or 'required', found 'yes'"


@pytest.mark.parametrize(("model", "extra"), [(NEMOTRON, "mtp.layers.2.norm"), (QWEN, "mtp.layers.1.input_layernorm")])
def test_several_layers_with_own_weights_are_refused(
    model: str, extra: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_of(directories[model], tmp_path)
    write_tensors(directory, tensors_of(directory) | {f"{extra}.weight": torch.ones(4)})
    assert "several MTP layers with weights of their own are not supported" in refusal(directory, "required")


DAMAGES: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "missing norm": (
        NEMOTRON,
        lambda found: found.pop("mtp.layers.0.enorm.weight"),
        r"lacks 1 .*mtp\.layers\.0\.enorm",
    ),
    "missing expert": (
        NEMOTRON,
        lambda found: found.pop("mtp.layers.1.mixer.experts.3.up_proj.weight"),
        r"lacks 1 .*mtp\.layers\.1\.mixer\.experts\.3\.up_proj",
    ),
    "unknown": (
        QWEN,
        lambda found: found.update({"mtp.layers.0.other": torch.ones(2)}),
        r"has 1 .*mtp\.layers\.0\.other",
    ),
    "shape of fc": (
        QWEN,
        lambda found: found.update({"mtp.fc.weight": torch.ones(3, 5)}),
        r"tensor mtp\.fc\.weight has shape \(3, 5\), but the model needs",
    ),
    "shape of the router": (
        NEMOTRON,
        lambda found: found.update({"mtp.layers.1.mixer.gate.weight": torch.ones(3, 5)}),
        r"tensor mtp\.layers\.1\.mixer\.gate\.weight has shape \(3, 5\)",
    ),
    "type": (
        QWEN,
        lambda found: found.update({"mtp.fc.weight": torch.ones(3, 5).to(torch.float8_e4m3fn)}),
        r"tensor mtp\.fc\.weight is of type F8_E4M3",
    ),
}


@pytest.mark.usefixtures("no_model_is_built")
@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_head_is_refused(name: str, directories: dict[str, Path], tmp_path: Path) -> None:
    model, damage, message = DAMAGES[name]
    directory = copy_of(directories[model], tmp_path)
    tensors = tensors_of(directory)
    damage(tensors)
    write_tensors(directory, tensors)
    assert re.search(message, refusal(directory))


@pytest.mark.parametrize("kind", ["transformers F32", "modelopt FP8", "compressed-tensors FP8 a row", "modelopt NVFP4"])
def test_quantized_head_stays_quantized(kind: str, tmp_path: Path) -> None:
    directory = written(wide_checkpoint(NEMOTRON), tmp_path)
    quantize(directory, KINDS[kind])
    head = load_hugging_face(directory, mtp="required").mtp
    assert head is not None
    dequantized = load_hugging_face(directory, mtp="required", dequantizes=True).mtp
    assert dequantized is not None
    kept = [module for module in head.modules() if isinstance(module, QuantizableLinear) and module.form is not None]
    experts = [module for module in head.modules() if isinstance(module, StackedExperts) and module.forms]
    assert kept and experts
    assert not any(getattr(module, "form", None) for module in dequantized.modules())


def test_quantized_tensor_without_its_scale_is_refused(tmp_path: Path) -> None:
    directory = written(wide_checkpoint(NEMOTRON), tmp_path)
    quantize(directory, KINDS["transformers F32"])
    tensors = tensors_of(directory)
    scale = next(name for name in sorted(tensors) if name.startswith("mtp.") and "q_proj" in name and "scale" in name)
    del tensors[scale]
    write_tensors(directory, tensors)
    assert re.search(r"tensor mtp\.layers\.0\.mixer\.q_proj\.weight lacks its scale", refusal(directory))
    assert load_hugging_face(directory).mtp is None
