"""Load a Hugging Face checkpoint of a hybrid model into Megatron, ready for `build_engine`."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
from megatron.core.models.mamba.mamba_model import MambaModel

from ...installation import install_command
from ..architecture import HybridArchitecture
from ..families import bamba, granite_hybrid, nemotron_h, qwen3_5, qwen3_next
from ..hybrid_model import check_buildable
from ..parameter_shapes import filled_of
from ..placement import Placements, stored_shape
from ..rank_shard import EMBEDDINGS, RankShard
from .checkpoint_config import TEXT_CONFIGS, CheckpointConfig
from .checkpoint_tensors import CheckpointTensors
from .kv_cache_scales import read_kv_scales, set_kv_scales
from .model_filling import ModelFilling
from .quantization_config import QuantizationConfig
from .stored_names import OtherNames, StoredTensors, mtp_names, num_mtp_layers, warn_of_left_out

ActivationDtype = Literal["auto", "bf16"]
"""Inputs of FP8 weights for prompt tokens: quantized as the checkpoint says ("auto"), or bf16."""

FAMILIES: dict[str, ModuleType] = {
    "nemotron_h": nemotron_h,
    "bamba": bamba,
    "granitemoehybrid": granite_hybrid,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
}
"""`model_type` in config.json → module that maps the configuration and the tensor names."""

_TEXT_PREFIXES = ("language_model.", "model.language_model.", "")


@dataclass(frozen=True, slots=True)
class CheckpointFamily:
    """The language model that a directory's config.json describes, and the module for its model family.

    Attributes:
        module: The module in `FAMILIES` for this `model_type`.
        config: The fields that describe the language model.
        whole: All fields in the file; the same as `config` unless the language model is part of a multimodal model.
        dtype: bfloat16 if the file says that the weights are bfloat16 or quantized, else float32.
        is_wrapped: True if the language model is part of a multimodal model.
        quantization: Quantization formats of the weights; None if they are not quantized.
    """

    module: ModuleType
    config: CheckpointConfig
    whole: CheckpointConfig
    dtype: torch.dtype
    is_wrapped: bool
    quantization: QuantizationConfig | None

    @staticmethod
    def read(directory: Path) -> "CheckpointFamily":
        """Read config.json from a model directory.

        Raises:
            ValueError: If the file or a field is missing, or the family or quantization is not supported.
        """
        whole = CheckpointConfig.read(directory)
        is_own = any(whole.equals("model_type", name, "") for name in FAMILIES)
        text = whole if is_own else whole.section(*TEXT_CONFIGS)
        is_wrapped = not is_own and text.has("model_type")
        config = text if is_wrapped else whole
        module = FAMILIES[config.one_of("model_type", sorted(FAMILIES))]
        is_bfloat16 = any(
            fields.equals(name, "bfloat16", None) for fields in (config, whole) for name in ("dtype", "torch_dtype")
        )
        quantization = QuantizationConfig.read(directory)
        dtype = torch.bfloat16 if is_bfloat16 or quantization else torch.float32
        return CheckpointFamily(module, config, whole, dtype, is_wrapped, quantization)

    def architecture(self, names: Collection[str] | None = None) -> HybridArchitecture:
        """Return the architecture that the configuration describes.

        Args:
            names: Tensor names in the checkpoint. If both embeddings and output weights are stored, they are untied
                even if the configuration says otherwise, as in transformers.
        """
        found: HybridArchitecture = self.module.architecture_of(self.config)
        if self.is_wrapped and self.whole.flag("tie_word_embeddings", False):
            found = replace(found, tie_embeddings=True)
        if names is None or not found.tie_embeddings:
            return found
        others, ends = self._other_names(), (self.module.ENDS["embeddings"], self.module.ENDS["output"])
        has_both = all(any(name in names for name in others.of(end)) for end in ends)
        return replace(found, tie_embeddings=not has_both)

    def other_names(self, architecture: HybridArchitecture) -> OtherNames:
        """Return the rules for alternative tensor names, including the output layer's name for tied embeddings."""
        others, ends = self._other_names(), self.module.ENDS
        tied = {ends["embeddings"]: (ends["output"],)} if architecture.tie_embeddings else {}
        return replace(others, parts={**tied, **others.parts})

    def is_other_part(self, name: str) -> bool:
        """Return True if a tensor belongs to a multimodal model but not to its language model."""
        if name.startswith(self._other_names().left_out):
            return True
        return self.is_wrapped and not name.startswith(tuple(filter(None, _TEXT_PREFIXES)))

    def _other_names(self) -> OtherNames:
        others: OtherNames = self.module.OTHER_NAMES
        return replace(others, prefixes=_TEXT_PREFIXES) if self.is_wrapped else others


_NAMES_SHOWN = 8
_FETCHED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with loaded weights, its architecture, and the directory of its files.

    Args:
        quantized: Text about the quantized tensors in the files, printed at start-up; "" if there are none.
        num_kept: Number of these tensors that stay quantized in memory.
    """

    model: MambaModel
    architecture: HybridArchitecture
    directory: Path
    quantized: str = ""
    num_kept: int = 0


def read_sizes(directory: Path) -> tuple[HybridArchitecture, torch.dtype]:
    """Return the architecture that config.json describes, and the default dtype for the weights.

    Raises:
        ValueError: If a field is missing or not supported; the message names file and field.
    """
    family = CheckpointFamily.read(directory)
    return family.architecture(), family.dtype


def load_hugging_face(
    source: str | Path,
    dtype: torch.dtype | None = torch.bfloat16,
    *,
    dequantizes: bool = False,
    activation_dtype: ActivationDtype = "auto",
) -> LoadedModel:
    """Load a model directory (config.json and safetensors) onto the current device.

    Each tensor that this rank needs is read and reduced to the rank's shard before the next is read. If the dtype is
    bfloat16, weights of linear layers and experts that are stored in FP8, NVFP4 or MXFP4 stay quantized in memory;
    all other quantized tensors are dequantized. If `source` is not a directory, it is a model name on the Hugging Face
    hub; huggingface_hub, which must be installed, finds the model in its cache or downloads it.

    Args:
        dtype: Dtype of the weights. None selects bfloat16 if config.json says that the weights are bfloat16 or
            quantized, and float32 otherwise.
        dequantizes: True to dequantize all weights.
        activation_dtype: "auto": linear layers with FP8 weights quantize the activations of prompt tokens to FP8, if
            config.json says so; "bf16": activations are not quantized.

    Raises:
        ValueError: If a file or tensor is missing, damaged, unexpected, of the wrong shape or not supported; the
            message names it. A partially loaded model is never returned.
        MemoryError: If the weights do not fit in memory; the message gives the model's largest dimensions.
    """
    directory = _directory_of(source)
    family = CheckpointFamily.read(directory)
    files = CheckpointTensors(directory, family.quantization)
    architecture = family.architecture(files.names.keys())
    with naming_source(directory / "config.json"):
        check_buildable(architecture)
    placements = _placements(family, architecture, files, directory)
    kv_scales = read_kv_scales(files, placements)
    num_unused = len(files.other_scales) - len(kv_scales)
    warn_of_left_out(directory, num_unused, "scales of activations or of the KV cache, which are not used")
    shapes = {name: whole.shape for name, whole in filled_of(architecture).items()}
    _check_shapes(directory, files, placements, shapes)
    dtype = dtype or family.dtype
    keeps, quantizes = dtype is torch.bfloat16 and not dequantizes, _quantizes_activations(activation_dtype)
    with naming_source(directory / "config.json"):
        filling = ModelFilling(
            architecture, dtype, placements, files, keeps_quantized=keeps, quantizes_activations=quantizes
        )
    filling.fill()
    set_kv_scales(filling.model, kv_scales, RankShard.of_process(architecture).local_name)
    if unfilled := filling.unfilled():
        raise ValueError(f"{directory}: the checkpoint does not contain values for {listed(unfilled)}")
    return LoadedModel(filling.model, architecture, directory, files.quantized_summary(placements), filling.num_kept)


def _quantizes_activations(activation_dtype: str) -> bool:
    if activation_dtype not in ("auto", "bf16"):
        raise ValueError(f"activation_dtype must be 'auto' or 'bf16', found {activation_dtype!r}")
    return activation_dtype == "auto"


def _directory_of(source: str | Path) -> Path:
    directory = Path(source)
    if directory.is_dir():
        return directory
    if directory.is_absolute() or str(source).count("/") != 1:
        raise ValueError(
            f"{source} is not a directory; give a Hugging Face model directory, or a hub name as OWNER/NAME"
        )
    missing = f"{source} is not a directory in {Path.cwd()}"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(
            f"{missing}, and huggingface_hub, which could fetch a model of that name, is not installed: "
            f"{install_command('hf')}"
        ) from error
    try:
        return Path(snapshot_download(str(source), allow_patterns=_FETCHED))
    except (OSError, ValueError) as error:  # base classes of the errors that huggingface_hub raises
        reason = " ".join(str(error).split())
        raise ValueError(f"{missing}, and huggingface_hub cannot fetch a model of that name: {reason}") from error


def _placements(
    family: CheckpointFamily, architecture: HybridArchitecture, files: CheckpointTensors, directory: Path
) -> Placements:
    """Return the destinations of each stored tensor, after checking that no tensor is missing or unknown."""
    usual, names = family.module.placements_of(architecture), files.names.keys()
    stored = StoredTensors.find(usual, names, family.other_names(architecture), directory)
    unknown, known = names - stored.placements.keys(), stored.placements.keys()
    mtp = mtp_names(unknown, known, num_mtp_layers(family.config))
    other_parts = [name for name in unknown.difference(mtp) if family.is_other_part(name)]
    files.check(left_out={*mtp, *other_parts})
    _check_names(directory, sorted(unknown.difference(mtp, other_parts)), stored.missing)
    warn_of_left_out(directory, len(mtp))
    warn_of_left_out(directory, len(other_parts), "parts other than the language model, which are not used")
    return stored.placements


def _check_names(directory: Path, unknown: Sequence[str], missing: Mapping[str, Sequence[str]]) -> None:
    errors = [f"has {listed(unknown)}, which the model does not have"] if unknown else []
    if missing:
        lacking = sorted(missing)
        tried = shortened(missing[lacking[0]][1:])
        errors.append(f"lacks {listed(lacking)}" + (f" (the first is also read as {tried})" if tried else ""))
    if errors:
        raise ValueError(f"{directory}: the checkpoint {', and '.join(errors)}")


def _check_shapes(
    directory: Path, files: CheckpointTensors, placements: Placements, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `ValueError` unless each stored tensor has the shape that the undivided model needs."""
    for name, targets in placements.items():
        found, needed = files.shapes[name], stored_shape(targets, shapes)
        if found != needed:
            sizes = "the vocab_size and hidden_size in" if targets[0].target == EMBEDDINGS else "according to"
            raise ValueError(
                f"{files.names[name]}: tensor {name} has shape {found}, but the model needs {needed}, {sizes} "
                f"{directory / 'config.json'}"
            )


@contextmanager
def naming_source(source: str | Path) -> Iterator[None]:
    """Context manager that names `source`, which describes the model, in errors raised while the model is built."""
    try:
        yield
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{source} describes a model that Megatron cannot build: {error}") from error
    except MemoryError as error:
        raise MemoryError(f"{source}: {error}") from error


def listed(names: Sequence[str]) -> str:
    """Return text for error messages with the number of tensors and the first few of their names."""
    return f"{len(names)} tensors: {shortened(names)}"


def shortened(names: Sequence[str]) -> str:
    """Return text for error messages with the first few names and the number of names left out."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(names[:_NAMES_SHOWN])}{more}"
