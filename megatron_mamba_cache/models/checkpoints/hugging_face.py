"""Load a Hugging Face checkpoint of a hybrid model into Megatron, ready for `build_engine`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from megatron.core import parallel_state
from megatron.core.models.mamba.mamba_model import MambaModel

from ...installation import install_command
from ..architecture import HybridArchitecture
from ..families import bamba, granite_hybrid, nemotron_h
from ..hybrid_model import build_hybrid_model, check_buildable
from ..parameter_shapes import filled_of
from ..placement import ModelFiller, Placements, stored_shape
from ..rank_part import EMBEDDINGS, RankPart
from .checkpoint_config import CheckpointConfig
from .loading_progress import loading_progress
from .multi_token_prediction import mtp_names, num_mtp_layers, warn_of_mtp
from .quantized_checkpoints import check_not_quantized
from .safetensors_files import SafetensorsFiles

FAMILIES: dict[str, ModuleType] = {"nemotron_h": nemotron_h, "bamba": bamba, "granitemoehybrid": granite_hybrid}
"""`model_type` of a config → the module that knows its architecture and tensor names."""

_OUTPUT = "lm_head.weight"
_NAMES_SHOWN = 8
_FETCHED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and its source."""

    model: MambaModel
    architecture: HybridArchitecture
    directory: Path


def read_sizes(directory: Path) -> tuple[HybridArchitecture, torch.dtype]:
    """Return the architecture that a directory's config.json describes, and the dtype of its weights.

    Raises:
        ValueError: Naming the file and the field, if it is missing or not supported.
    """
    config = CheckpointConfig.read(directory)
    family = FAMILIES[config.one_of("model_type", sorted(FAMILIES))]
    return family.architecture_of(config), _stored_dtype(config)


def load_hugging_face(source: str | Path, dtype: torch.dtype | None = torch.bfloat16) -> LoadedModel:
    """Load a model directory (config.json and safetensors) onto the current device.

    Tensors that this rank needs are read one at a time, and cut to the rank's part on the way in. A name that is not a
    directory is looked up in the local cache of huggingface_hub, or downloaded by it, if that is installed.

    Args:
        dtype: Dtype of the weights; None: bfloat16 if config.json says that they are stored so, else float32.

    Raises:
        ValueError: Naming file and tensor, if anything is missing, damaged, superfluous, of the wrong shape or not
            supported; no model is returned half-loaded.
        MemoryError: Naming the configuration, and the largest sizes in it, if the weights do not fit in memory.
    """
    directory = _directory_of(source)
    config = CheckpointConfig.read(directory)
    family = FAMILIES[config.one_of("model_type", sorted(FAMILIES))]
    check_not_quantized(directory)
    files = SafetensorsFiles(directory)
    architecture = _with_own_output(family.architecture_of(config), files)
    with naming_source(directory / "config.json"):
        check_buildable(architecture)
    placements = family.placements_of(architecture)
    left_out = mtp_names(files.names.keys() - placements.keys(), placements.keys(), num_mtp_layers(config))
    _check_names(directory, files.names.keys() - set(left_out), placements)
    if left_out:
        warn_of_mtp(directory, len(left_out))
    shapes = {name: whole.shape for name, whole in filled_of(architecture).items()}
    _check_shapes(directory, files, placements, shapes)
    with naming_source(directory / "config.json"):
        model = build_hybrid_model(architecture, dtype or _stored_dtype(config))
    filler = ModelFiller(
        model,
        placements,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        RankPart.of_process(architecture).local_name,
    )
    _fill(filler, files, placements)
    if unfilled := filler.unfilled():
        raise ValueError(f"{directory}: the checkpoint leaves {listed(unfilled)} of the model without values")
    return LoadedModel(model, architecture, directory)


def _directory_of(source: str | Path) -> Path:
    directory = Path(source)
    if directory.is_dir():
        return directory
    if directory.is_absolute() or str(source).count("/") != 1:
        raise ValueError(f"{source} is no directory; give a Hugging Face model directory, or a hub name as OWNER/NAME")
    missing = f"{source} is no directory in {Path.cwd()}"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError(
            f"{missing}, and huggingface_hub, which could fetch a model of that name, is not installed: "
            f"{install_command('hf')}"
        ) from error
    try:
        return Path(snapshot_download(str(source), allow_patterns=_FETCHED))
    except (OSError, ValueError) as error:  # huggingface_hub's errors are of these kinds
        reason = " ".join(str(error).split())
        raise ValueError(f"{missing}, and huggingface_hub cannot fetch a model of that name: {reason}") from error


def _stored_dtype(config: CheckpointConfig) -> torch.dtype:
    """Return bfloat16 if the configuration names it, under the newer or the older field; else float32."""
    is_bfloat16 = any(config.equals(name, "bfloat16", None) for name in ("dtype", "torch_dtype"))
    return torch.bfloat16 if is_bfloat16 else torch.float32


def _with_own_output(architecture: HybridArchitecture, files: SafetensorsFiles) -> HybridArchitecture:
    """Return the architecture, untied if the checkpoint has output weights anyway; transformers would use them."""
    return replace(architecture, tie_embeddings=architecture.tie_embeddings and _OUTPUT not in files.names)


def _check_names(directory: Path, names: Set[str], placements: Placements) -> None:
    unknown, missing = sorted(names - placements.keys()), sorted(placements.keys() - names)
    if unknown:
        raise ValueError(f"{directory}: the checkpoint has {listed(unknown)}, which the model has no place for")
    if missing:
        raise ValueError(f"{directory}: the checkpoint lacks {listed(missing)}")


def _check_shapes(
    directory: Path, files: SafetensorsFiles, placements: Placements, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `ValueError` if a tensor has another shape than the whole model has for it, before a model is built."""
    for name, places in placements.items():
        found, needed = files.shapes[name], stored_shape(places, shapes)
        if found != needed:
            sizes = "the vocab_size and hidden_size of" if places[0].target == EMBEDDINGS else "by"
            raise ValueError(
                f"{files.names[name]}: tensor {name} has shape {found} where the model has {needed}, {sizes} "
                f"{directory / 'config.json'}"
            )


@contextmanager
def naming_source(source: str | Path) -> Iterator[None]:
    """Name what describes a model in errors about building it."""
    try:
        yield
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{source} describes no model that Megatron builds: {error}") from error
    except MemoryError as error:
        raise MemoryError(f"{source}: {error}") from error


def _fill(filler: ModelFiller, files: SafetensorsFiles, names: Iterable[str]) -> None:
    wanted = {name for name in names if filler.wants(name)}
    with loading_progress(len(wanted)) as advance:
        for name, tensor in files.tensors(wanted):
            try:
                filler.fill(name, tensor)
            except ValueError as error:
                raise ValueError(f"{files.names[name]}: {error}") from error
            del tensor  # otherwise two are held while the next one is read
            advance()


def listed(names: Sequence[str]) -> str:
    """Return the number of tensors and the names of the first few."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{len(names)} tensors: {', '.join(names[:_NAMES_SHOWN])}{more}"
