"""Find a Megatron checkpoint's architecture: given by the caller, in a JSON file, or in the training arguments."""

from dataclasses import dataclass
from pathlib import Path

from ..architecture import HybridArchitecture
from . import megatron_arguments
from .architecture_file import ARCHITECTURE_FILE, read_architecture
from .checkpoint_config import CheckpointConfig
from .common_state import COMMON_FILE, CommonState

_TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_MAX_DIGITS = 12


def weights_directory(directory: Path) -> Path:
    """Return the directory of a training run's latest checkpoint; `directory` itself if it has no tracker file.

    The tracker file, which Megatron-LM writes, contains the number of the latest iteration.

    Raises:
        ValueError: If the tracker file does not contain a number, or the directory of that iteration is missing.
    """
    tracker = directory / _TRACKER
    if not tracker.is_file():
        return directory
    try:
        named = tracker.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {tracker}: {error}") from error
    if named != _RELEASE and not (named.isascii() and named.isdigit() and len(named) <= _MAX_DIGITS):
        raise ValueError(f"{tracker} contains {named!r:.80}, but must contain an iteration number or {_RELEASE!r}")
    latest = directory / (named if named == _RELEASE else f"iter_{int(named):07d}")
    if not latest.is_dir():
        raise ValueError(f"{tracker} names {latest}, which is not a directory; give the directory of one iteration")
    return latest


_REMEDY = f"write {ARCHITECTURE_FILE} next to the weights, or pass architecture= to load_megatron_checkpoint"


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model architecture, and a phrase that names its source in error messages."""

    architecture: HybridArchitecture
    source: str


def written_architecture(
    given: HybridArchitecture | None, directory: Path, run_directory: Path
) -> DescribedModel | None:
    """Return the given architecture or, if it is None, the one in `hybrid_architecture.json`; None without that file.

    Args:
        directory: Directory of the weights. Its JSON file takes precedence over the one in `run_directory`.

    Raises:
        ValueError: If the file is damaged, or the directory does not hold a checkpoint.
    """
    if given is not None:
        return DescribedModel(given, "the given architecture")
    for folder in (directory, run_directory):
        if (folder / ARCHITECTURE_FILE).exists():
            return DescribedModel(read_architecture(folder), str(folder / ARCHITECTURE_FILE))
    if not directory.is_dir():
        raise ValueError(f"cannot read {directory}: no such directory")
    if not (directory / COMMON_FILE).exists():
        raise ValueError(
            f"{directory} has neither {ARCHITECTURE_FILE} nor a training run's arguments in {COMMON_FILE}; give the "
            "directory of a Megatron distributed checkpoint (torch_dist)"
        )
    return None


def trained_architecture(common: CommonState, directory: Path) -> DescribedModel:
    """Return the architecture that the arguments of the training run, stored in the checkpoint, describe.

    Raises:
        ValueError: If no arguments are stored or one is not supported; the message names the file and the argument.
    """
    path = directory / COMMON_FILE
    if common.arguments is None:
        raise ValueError(
            f"{path} does not contain the arguments of a training run, so the architecture is unknown; {_REMEDY}"
        )
    try:
        architecture = megatron_arguments.architecture_of(CheckpointConfig(common.arguments, str(path), "args."))
    except ValueError as error:
        raise ValueError(f"{error}; if the model has another architecture, {_REMEDY}") from error
    return DescribedModel(architecture, f"the arguments in {path}")
