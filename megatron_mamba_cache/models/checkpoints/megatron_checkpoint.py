"""Save Megatron distributed checkpoints (torch_dist), and load checkpoints saved here or by Megatron-LM."""

import math
import pickle
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.models.mamba.mamba_model import MambaModel
from torch.distributed.checkpoint.api import CheckpointException

from ...mcore.mtp_head import MTPHead, RemoteHead
from ..allocation import without_memory
from ..architecture import HybridArchitecture
from ..hybrid_model import build_hybrid_model
from ..mtp_head import build_mtp_head, share_tied_embeddings
from ..rank_shard import EMBEDDINGS, OUTPUT, RankShard
from .architecture_file import write_architecture
from .checkpoint_architecture import DescribedModel, trained_architecture, weights_directory, written_architecture
from .checkpoint_writer import InProcessSaveStrategy, is_training_state
from .common_state import COMMON_FILE, CommonState, NoCommonState, check_tensor_index, read_common_state
from .hugging_face import LoadedModel
from .loading_errors import listed, naming_source
from .loading_progress import loading_progress
from .megatron_head import HEAD, sharded_head, stored_head
from .megatron_shard import BuiltShard, fill_shard, has_copied_embeddings, stacked_parts, wanted_tensors
from .mtp_tensors import MTPLoading, found_head
from .stored_names import is_first_rank, mtp_names, warn_of_left_out

PORTION_BYTES = 2 * 2**30
"""Number of bytes to read from a checkpoint between progress updates."""
_MOST_PORTIONS = 16
_FILES = (".metadata", COMMON_FILE, "metadata.json")

_LOAD_ERRORS = (
    *(CheckpointingException, CheckpointException, OSError, RuntimeError, EOFError, pickle.UnpicklingError),
    *(ValueError, LookupError, AttributeError, TypeError, ImportError),  # unpickling damaged bytes may raise these
)


class _Mismatch(ValueError):
    """Raised when a checkpoint is intact but belongs to a different model."""


def save_megatron_checkpoint(
    model: MambaModel,
    architecture: HybridArchitecture,
    directory: str | Path,
    head: MTPHead | RemoteHead | None = None,
) -> None:
    """Save a model's weights and architecture; collective over all ranks. Any number of ranks can load the checkpoint.

    Args:
        head: The model's multi-token prediction head; None if it has none.

    Raises:
        ValueError: If the directory is not empty or cannot be created.
        OSError: If a file cannot be written.
    """
    path = Path(directory)
    _make_empty(path)
    _barrier()  # no rank writes before all ranks have checked that the directory is empty
    try:
        state = model.sharded_state_dict()
        if has_copied_embeddings(architecture):
            del state[OUTPUT]
        if isinstance(head, MTPHead):
            of_head = sharded_head(head)
            of_head.pop(f"{HEAD}{EMBEDDINGS}", None)
            state |= of_head
        dist_checkpointing.save(state, str(path), InProcessSaveStrategy())
    except CheckpointException as error:
        raise OSError(f"cannot write a checkpoint to {path}: {_reason(error)}") from error
    if is_first_rank():
        write_architecture(architecture, path)
    _barrier()


def read_sizes(directory: Path) -> tuple[HybridArchitecture, torch.dtype]:
    """Return the architecture of a checkpoint and the dtype of its weights, without reading the weights.

    Raises:
        ValueError: If a file is missing or describes an unsupported model; the message names the file.
    """
    path = weights_directory(directory)
    described = written_architecture(None, path, directory) or trained_architecture(read_common_state(path), path)
    return described.architecture, _stored_dtype(path)


def load_megatron_checkpoint(
    directory: str | Path,
    dtype: torch.dtype | None = torch.bfloat16,
    architecture: HybridArchitecture | None = None,
    mtp: MTPLoading = "none",
) -> LoadedModel:
    """Load a checkpoint saved by `save_megatron_checkpoint` or Megatron-LM, with any number of ranks.

    Args:
        directory: Directory of one checkpoint, or of a training run, whose latest checkpoint is loaded.
        dtype: Dtype of the weights. None selects bfloat16 if most weights are stored as bfloat16, else float32.
        architecture: Architecture of the model. If None, it is read from hybrid_architecture.json in the directory
            or, without that file, from the training arguments in common.pt.
        mtp: As in `load_hugging_face`; the tensors tell which layers the head has.

    Raises:
        ValueError: If a file or tensor is missing, unexpected or does not fit the model; the message names it. A
            partially loaded model is never returned.
        MemoryError: If the weights do not fit in memory.
    """
    path = weights_directory(Path(directory))
    written = written_architecture(architecture, path, Path(directory))
    _check_files(path)
    common = read_common_state(path)
    described = written or trained_architecture(common, path)
    check_tensor_index(path)
    dtype = dtype or _stored_dtype(path)
    with _naming_weights(path, described):
        stored: Mapping[str, Any] = load_sharded_metadata(str(path))
    find = partial(stored_head, described.architecture, stored, path)
    head = found_head(find, mtp, is_named=bool(mtp_names(stored)))
    _check_index(path, described, head, dtype, common, stored)
    built = _built(described, head, dtype)
    with _naming_weights(path, described):
        wanted = wanted_tensors(built, described.architecture, common, stored)
        stacked = stacked_parts(built, wanted)
        state = _read(path, wanted, stored)
    fill_shard(built, state, stacked)
    if built.head is not None:
        share_tied_embeddings(built.head, built.model, described.architecture)
    found = RemoteHead(head.pattern) if head is not None and built.head is None else built.head
    return LoadedModel(built.model, described.architecture, Path(directory), mtp=found)


def read_head_pattern(directory: Path) -> str:
    """Return the layer pattern of the MTP head in a checkpoint; empty if it has none that is supported."""
    path = weights_directory(directory)
    architecture, _ = read_sizes(directory)
    with suppress(ValueError):
        return stored_head(architecture, load_sharded_metadata(str(path)), path).pattern
    return ""


def _read(path: Path, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Read and return the tensors in `wanted`, in portions, to show progress; collective over all ranks."""
    tensors = [part for part in stored.values() if isinstance(part, ShardedTensor)]
    num_bytes = sum(part.dtype.itemsize * math.prod(part.global_shape) for part in tensors)
    num_portions = min(max(num_bytes // PORTION_BYTES, 1), _MOST_PORTIONS)
    names = list(wanted)
    state: dict[str, Any] = {}
    with loading_progress(len(names)) as advance:
        for first in range(num_portions):
            portion = names[first::num_portions]
            part = {name: wanted[name] for name in portion}
            state |= dist_checkpointing.load(part, str(path), common_strategy=NoCommonState())
            for _ in portion:
                advance()
    return state


def _check_index(
    path: Path,
    described: DescribedModel,
    head: HybridArchitecture | None,
    dtype: torch.dtype,
    common: CommonState,
    stored: Mapping[str, Any],
) -> None:
    """Check the stored tensors' metadata against the model and the head built on the meta device."""
    with without_memory():
        built = _built(described, head, dtype)
    with _naming_weights(path, described):
        with without_memory():
            wanted = wanted_tensors(built, described.architecture, common, stored)
        _check_tensors(path, described, wanted, stored)


def _built(described: DescribedModel, head: HybridArchitecture | None, dtype: torch.dtype) -> BuiltShard:
    """Build the model and its head with uninitialized weights; errors name the source of the architecture."""
    with naming_source(described.source):
        model = build_hybrid_model(described.architecture, dtype)
        is_here = RankShard.of_process(described.architecture).is_last_stage
        return BuiltShard(model, build_mtp_head(head, dtype) if head is not None and is_here else None)


@contextmanager
def _naming_weights(path: Path, described: DescribedModel) -> Iterator[None]:
    """Context manager that names the checkpoint and the source of the architecture in errors raised while loading."""
    try:
        yield
    except _Mismatch:
        raise
    except _LOAD_ERRORS as error:
        raise ValueError(
            f"{path} does not hold the weights that {described.source} describes: {_reason(error)}"
        ) from error


def _stored_dtype(path: Path) -> torch.dtype:
    """Return bfloat16 if most parameters are stored as bfloat16, otherwise float32."""
    try:
        stored = [part for part in load_sharded_metadata(str(path)).values() if isinstance(part, ShardedTensor)]
        sizes = [(tensor.dtype, math.prod(tensor.global_shape)) for tensor in stored]
    except _LOAD_ERRORS as error:
        raise ValueError(f"{path} does not hold the weights of a model: {_reason(error)}") from error
    num_bfloat16 = sum(size for dtype, size in sizes if dtype is torch.bfloat16)
    return torch.bfloat16 if 2 * num_bfloat16 > sum(size for _, size in sizes) else torch.float32


def _make_empty(path: Path) -> None:
    """Create a directory if it does not exist; raise `ValueError` if it exists and is not empty."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_empty = next(path.iterdir(), None) is None
    except OSError as error:
        raise ValueError(f"cannot create the directory {path}: {error.strerror}") from error
    if not is_empty:
        raise ValueError(f"{path} is not empty; give a new directory")


def _check_files(path: Path) -> None:
    """Raise `ValueError` if a weight file is missing or empty."""
    for file in [*(path / name for name in _FILES), *sorted(path.glob("*.distcp"))]:
        if not file.is_file() or not file.stat().st_size:
            found = "empty" if file.is_file() else "missing"
            raise ValueError(
                f"{path} does not hold the weights of a model: {file} is {found}; copy it or save it again"
            )


def _check_tensors(path: Path, described: DescribedModel, wanted: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Raise `_Mismatch` unless the checkpoint's tensors, apart from training state, are exactly the model's."""
    parts = dict(wanted)
    apply_factories(parts)
    needed = {part.key: part for part in nested_values(parts)}
    anywhere = _of_all_ranks(needed.keys())
    missing = sorted(anywhere - stored.keys())
    superfluous = sorted(name for name in stored.keys() - anywhere if not is_training_state(name))
    model = f"the model that {described.source} describes"
    if missing:
        also = f", and has {listed(superfluous)} that it does not have" if superfluous else ""
        raise _Mismatch(f"{path} lacks {listed(missing)} of {model}{also}")
    left_out = mtp_names(superfluous)
    if unknown := sorted(set(superfluous) - set(left_out)):
        raise _Mismatch(f"{path} has {listed(unknown)}, which {model} does not have")
    for name, part in needed.items():
        found, expected = tuple(stored[name].global_shape), tuple(part.global_shape)
        if found != expected:  # checked here, because Megatron fills up embeddings that are too small with zeros
            raise _Mismatch(f"{path}: tensor {name} has shape {found}, but {model} has {expected}")
    warn_of_left_out(path, len(left_out))


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[-1]


def _of_all_ranks(names: Collection[str]) -> set[str]:
    """Return the union of the names over all ranks."""
    found: list[Any] = [sorted(names)] * torch.distributed.get_world_size()
    if len(found) > 1:
        torch.distributed.all_gather_object(found, sorted(names))
    return {name for rank in found for name in rank}


def _barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
