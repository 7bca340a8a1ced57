"""Save and load Megatron distributed checkpoints (torch_dist), with the architecture beside the weights."""

import pickle
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.mamba.mamba_model import MambaModel
from torch.distributed.checkpoint.api import CheckpointException

from .architecture import HybridArchitecture, build_hybrid_model
from .architecture_file import ARCHITECTURE_FILE, read_architecture, write_architecture
from .checkpoint_writer import InProcessSaveStrategy
from .hugging_face import LoadedModel, listed

_FILES = (".metadata", "common.pt", "metadata.json")
_MODEL_PARTS = ("embedding.", "decoder.", "output_layer.")


_LOAD_ERRORS = (
    *(CheckpointingException, CheckpointException, OSError, RuntimeError, EOFError, pickle.UnpicklingError),
    *(ValueError, LookupError, AttributeError, TypeError, ImportError),  # what unpickling damaged bytes may raise
)


def save_megatron_checkpoint(model: MambaModel, architecture: HybridArchitecture, directory: str | Path) -> None:
    """Save a model's weights for any tensor-parallel size, and its architecture; all ranks call it.

    Raises:
        ValueError: If the directory is not empty or cannot be made.
        OSError: If a file cannot be written.
    """
    path = Path(directory)
    _make_empty(path)
    _barrier()  # no rank writes before all have seen the directory empty
    try:
        dist_checkpointing.save(model.sharded_state_dict(), str(path), InProcessSaveStrategy())
    except CheckpointException as error:
        raise OSError(f"cannot write a checkpoint to {path}: {_reason(error)}") from error
    if _is_first_rank():
        write_architecture(architecture, path)
    _barrier()


def load_megatron_checkpoint(directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    """Load what `save_megatron_checkpoint` wrote, under any tensor-parallel size.

    Raises:
        ValueError: Naming the file, if something is missing or does not fit; nothing is returned half-loaded.
    """
    path = Path(directory)
    architecture = read_architecture(path)
    _check_files(path)
    try:
        model = build_hybrid_model(architecture, dtype)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{path / ARCHITECTURE_FILE} describes no model that Megatron builds: {error}") from error
    try:
        state, superfluous, missing = dist_checkpointing.load(
            model.sharded_state_dict(), str(path), strict=StrictHandling.RETURN_ALL
        )
    except _LOAD_ERRORS as error:
        raise ValueError(
            f"{path} does not hold the weights that {ARCHITECTURE_FILE} describes: {_reason(error)}"
        ) from error
    _check_names(path, missing, superfluous)
    model.load_state_dict(state)
    return LoadedModel(model, architecture, path)


def _make_empty(path: Path) -> None:
    """Make a directory, or take one that is there and empty."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_empty = next(path.iterdir(), None) is None
    except OSError as error:
        raise ValueError(f"cannot make the directory {path}: {error.strerror}") from error
    if not is_empty:
        raise ValueError(f"{path} is not empty; give a new directory")


def _check_files(path: Path) -> None:
    """Raise `ValueError` that names a file of the weights that is missing or empty."""
    for file in [*(path / name for name in _FILES), *sorted(path.glob("*.distcp"))]:
        if not file.is_file() or not file.stat().st_size:
            found = "empty" if file.is_file() else "missing"
            raise ValueError(f"{path} does not hold the weights of a model: {file} is {found}; copy or save it anew")


def _check_names(path: Path, missing: set[str], superfluous: set[str]) -> None:
    """Raise `ValueError` unless the checkpoint has the model's tensors; a training run's other state is no concern."""
    superfluous = {name for name in superfluous if name.startswith(_MODEL_PARTS)}
    described = f"the model that {ARCHITECTURE_FILE} describes"
    if missing:
        raise ValueError(f"{path} lacks {listed(sorted(missing))} of {described}")
    if superfluous:
        raise ValueError(f"{path} has {listed(sorted(superfluous))}, which {described} has no place for")


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[-1]


def _is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
