"""Load a Hugging Face checkpoint of a hybrid model into Megatron, ready for `build_engine`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from megatron.core.models.mamba.mamba_model import MambaModel

from ...installation import install_command
from ...mcore.mtp_head import MTPHead, RemoteHead
from ..allocation import ReplaceWeights
from ..architecture import HybridArchitecture
from ..hybrid_model import build_hybrid_model, check_buildable
from ..mtp_head import build_mtp_head, has_own_embeddings, head_parameters, head_shard, share_tied_embeddings
from ..parameter_shapes import Parameters, filled_of
from ..placement import Placements, stored_shape
from ..rank_shard import EMBEDDINGS, RankShard
from .checkpoint_family import CheckpointFamily
from .checkpoint_tensors import CheckpointTensors
from .kv_cache_scales import KVScale, read_kv_scales, set_kv_scales
from .loading_errors import listed, naming_source, shortened
from .model_filling import Model, ModelFilling
from .mtp_tensors import MTPLoading, find_head, stores_head
from .stored_names import StoredTensors, mtp_names, num_mtp_layers, warn_of_left_out

ActivationDtype = Literal["auto", "bf16"]
"""Inputs of FP8 weights for prompt tokens: quantized as the checkpoint says ("auto"), or bf16."""

_FETCHED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with loaded weights, its architecture, and the directory of its files.

    Args:
        quantized: Text about the quantized tensors in the files, printed at start-up; "" if there are none.
        num_kept: Number of these tensors that stay quantized in memory.
        mtp: The multi-token prediction head; None if none was loaded.
    """

    model: MambaModel
    architecture: HybridArchitecture
    directory: Path
    quantized: str = ""
    num_kept: int = 0
    mtp: MTPHead | RemoteHead | None = None


def read_sizes(directory: Path) -> tuple[HybridArchitecture, torch.dtype]:
    """Return the architecture that config.json describes, and the default dtype for the weights.

    Raises:
        ValueError: If a field is missing or not supported; the message names file and field.
    """
    family = CheckpointFamily.read(directory)
    return family.architecture(), family.dtype


def read_head_pattern(directory: Path) -> str:
    """Return the layer pattern of the supported MTP head that the files store; empty if they store none.

    No tensors are read. The errors raised are those of `read_sizes`.
    """
    family = CheckpointFamily.read(directory)
    files = CheckpointTensors(directory, family.quantization)
    architecture = family.architecture(files.names.keys())
    of_mtp = _mtp_names(family, files, _tensors_of_model(family, architecture, files, directory))
    try:
        head = find_head(family.module, family.config, architecture, of_mtp, directory, "required")
    except ValueError:
        return ""
    return "" if head is None else head.architecture.pattern


def load_hugging_face(
    source: str | Path,
    dtype: torch.dtype | None = torch.bfloat16,
    *,
    dequantizes: bool = False,
    activation_dtype: ActivationDtype = "auto",
    mtp: MTPLoading = "none",
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
        mtp: "none": multi-token prediction (MTP) layers are skipped; "auto": they are loaded if they are supported,
            otherwise a warning says why not; "required": otherwise an error is raised.

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
    contents = _Contents.find(family, architecture, files, directory, mtp)
    contents.check(files, directory)
    dtype = dtype or family.dtype
    keeps, quantizes = dtype is torch.bfloat16 and not dequantizes, _quantizes_activations(activation_dtype)
    loading = _Loading(directory, files, dtype, keeps, quantizes)
    model = loading.filled(contents.model, build_hybrid_model)
    num_kept, head = model.num_kept, None
    if contents.head is not None and not contents.model.shard.is_last_stage:
        head = RemoteHead(contents.head.architecture.pattern)
    elif contents.head is not None:
        filled = loading.filled(contents.head, build_mtp_head)
        num_kept, head = num_kept + filled.num_kept, filled.model
        share_tied_embeddings(head, model.model, architecture)
    names = [name for part in contents.parts for name in part.placements]
    return LoadedModel(model.model, architecture, directory, files.quantized_summary(names), num_kept, head)


@dataclass(frozen=True, slots=True)
class _StoredPart:
    """The model, or its MTP head, as the files store it."""

    architecture: HybridArchitecture
    placements: Placements
    shapes: Mapping[str, tuple[int, ...]]
    kv_scales: Sequence[KVScale]
    shard: RankShard

    @staticmethod
    def read(
        architecture: HybridArchitecture,
        placements: Placements,
        parameters: Parameters,
        files: CheckpointTensors,
        shard: RankShard,
    ) -> "_StoredPart":
        shapes = {name: whole.shape for name, whole in parameters.items()}
        return _StoredPart(architecture, placements, shapes, read_kv_scales(files, placements), shard)


@dataclass(frozen=True, slots=True)
class _Contents:
    """The parts of a checkpoint that are loaded."""

    model: _StoredPart
    head: _StoredPart | None

    @property
    def parts(self) -> list[_StoredPart]:
        return [self.model] if self.head is None else [self.model, self.head]

    @staticmethod
    def find(
        family: CheckpointFamily,
        architecture: HybridArchitecture,
        files: CheckpointTensors,
        directory: Path,
        mtp: MTPLoading,
    ) -> "_Contents":
        """Find the destinations of each stored tensor, after checking that no tensor is missing or unknown."""
        stored = _tensors_of_model(family, architecture, files, directory)
        unknown, of_mtp = files.names.keys() - stored.placements.keys(), _mtp_names(family, files, stored)
        other_parts = [name for name in unknown.difference(of_mtp) if family.is_other_part(name)]
        head = find_head(family.module, family.config, architecture, of_mtp, directory, mtp)
        skipped = of_mtp if head is None else []
        files.check(left_out={*skipped, *other_parts})
        _check_names(directory, sorted(unknown.difference(of_mtp, other_parts)), stored.missing)
        if head is not None:
            _check_names(directory, head.unknown, head.tensors.missing)
        # A head that can be loaded was not asked for; with another `mtp`, a warning gives the reason.
        if mtp == "none" and not stores_head(family.module, family.config, architecture, of_mtp, directory):
            warn_of_left_out(directory, len(skipped))
        warn_of_left_out(directory, len(other_parts), "parts other than the language model, which are not used")
        shard = RankShard.of_process(architecture)
        model = _StoredPart.read(architecture, stored.placements, filled_of(architecture), files, shard)
        if head is None:
            return _Contents(model, None)
        placements = dict(head.tensors.placements)
        if has_own_embeddings():
            placements |= {name: to for name, to in stored.placements.items() if to[0].target == EMBEDDINGS}
        own, parameters = head.architecture, head_parameters(head.architecture)
        return _Contents(model, _StoredPart.read(own, placements, parameters, files, head_shard(own)))

    def check(self, files: CheckpointTensors, directory: Path) -> None:
        """Raise `ValueError` if a tensor has the wrong shape; log a warning about unused scales."""
        num_unused = len(files.other_scales) - sum(len(part.kv_scales) for part in self.parts)
        warn_of_left_out(directory, num_unused, "scales of activations or of the KV cache, which are not used")
        for part in self.parts:
            _check_shapes(directory, files, part.placements, part.shapes)


def _tensors_of_model(
    family: CheckpointFamily, architecture: HybridArchitecture, files: CheckpointTensors, directory: Path
) -> StoredTensors:
    usual = family.module.placements_of(architecture)
    return StoredTensors.find(usual, files.names.keys(), family.other_names(architecture), directory)


def _mtp_names(family: CheckpointFamily, files: CheckpointTensors, stored: StoredTensors) -> list[str]:
    known = stored.placements.keys()
    return mtp_names(files.names.keys() - known, known, num_mtp_layers(family.config))


@dataclass(frozen=True, slots=True)
class _Loading:
    """Settings with which the parts of a checkpoint are loaded."""

    directory: Path
    files: CheckpointTensors
    dtype: torch.dtype
    keeps_quantized: bool
    quantizes_activations: bool

    def filled(
        self, part: _StoredPart, build: Callable[[HybridArchitecture, torch.dtype, ReplaceWeights | None], Model]
    ) -> ModelFilling[Model]:
        """Build a part, and fill it from the files."""
        with naming_source(self.directory / "config.json"):
            filling = ModelFilling(
                partial(build, part.architecture, self.dtype),
                part.shard,
                part.placements,
                self.files,
                keeps_quantized=self.keeps_quantized,
                quantizes_activations=self.quantizes_activations,
            )
        filling.fill()
        set_kv_scales(filling.model, part.kv_scales, part.shard.local_name)
        if unfilled := filling.unfilled():
            raise ValueError(f"{self.directory}: the checkpoint does not contain values for {listed(unfilled)}")
        return filling


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
