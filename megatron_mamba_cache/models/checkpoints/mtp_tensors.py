"""Find the tensors of a multi-token prediction (MTP) head in a checkpoint."""

import logging
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeVar, get_args

from ..architecture import HybridArchitecture
from ..mtp_head import head_architecture
from ..placement import Placements
from .checkpoint_config import CheckpointConfig
from .stored_names import OtherNames, StoredTensors, is_first_rank, num_mtp_layers

MTPLoading = Literal["none", "auto", "required"]
"""When to load an MTP head: never, if the checkpoint has one that is supported, or always."""

Found = TypeVar("Found")

_LOG = logging.getLogger(__name__)
_PREFIXES = ("", "model.", "backbone.", "language_model.", "model.language_model.")
_ATTENTION = "*"
_SYMBOLS = set("*-E")  # of layers without states
_LAYER = re.compile(r"(?:^|\.)mtp\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class StoredHead:
    """An MTP head in the files of a checkpoint.

    Attributes:
        architecture: The model's architecture with the pattern of the head.
        tensors: Destinations of its tensors, and the missing ones.
        unknown: Sorted names of MTP tensors without a destination.
    """

    architecture: HybridArchitecture
    tensors: StoredTensors
    unknown: list[str]


def find_head(
    module: ModuleType,
    config: CheckpointConfig,
    architecture: HybridArchitecture,
    names: Collection[str],
    directory: Path,
    mtp: MTPLoading,
) -> StoredHead | None:
    """Return the head that a checkpoint stores, or None with a warning that says why it has none that is supported.

    Args:
        module: Module of the model family.
        architecture: The model's architecture.
        names: Names of the MTP tensors in the files.
        mtp: With "none", return None without a warning.

    Raises:
        ValueError: If `mtp` is "required" and there is no supported head, or if a tensor is stored twice.
    """
    is_named = bool(names) or num_mtp_layers(config) > 0
    head = found_head(lambda: _supported(module, config, architecture, names), mtp, is_named=is_named)
    if head is None:
        return None
    others: OtherNames = replace(module.OTHER_NAMES, parts={}, prefixes=_PREFIXES)
    tensors = StoredTensors.find(module.mtp_placements(head), names, others, directory)
    return StoredHead(head, tensors, sorted(set(names) - tensors.placements.keys()))


def stores_head(
    module: ModuleType,
    config: CheckpointConfig,
    architecture: HybridArchitecture,
    names: Collection[str],
    directory: Path,
) -> bool:
    """Return True if the tensors are a whole head that is supported; see `find_head`."""
    try:
        head = find_head(module, config, architecture, names, directory, "required")
    except ValueError:
        return False
    return head is not None and not (head.unknown or head.tensors.missing)


def _supported(
    module: ModuleType, config: CheckpointConfig, architecture: HybridArchitecture, names: Collection[str]
) -> HybridArchitecture:
    """Return the architecture of the head; raise `ValueError` if there is none or it is not supported."""
    if not names:
        is_named = num_mtp_layers(config) > 0
        found = (
            "it names MTP layers, but the files have no tensors of them" if is_named else "the model has no MTP layers"
        )
        raise config.error(f"{found}; drafts need another drafter")
    if not hasattr(module, "mtp_pattern"):
        raise config.error("MTP layers of this model_type are not supported")
    pattern: str = module.mtp_pattern(config, architecture)
    try:
        check_pattern(pattern, architecture)
    except ValueError as error:
        raise config.error(str(error)) from error
    head = head_architecture(architecture, pattern)
    placements: Placements = module.mtp_placements(head)
    if more := sorted(_layers(names) - _layers(placements)):
        raise config.error(f"{several_layers_error(more[0])}, {pattern!r}")
    return head


def check_pattern(pattern: str, architecture: HybridArchitecture) -> None:
    """Raise `ValueError` if a head with layers of this pattern is not supported for a model."""
    if _ATTENTION not in pattern or set(pattern) - _SYMBOLS:
        raise ValueError(
            f"MTP layers of pattern {pattern!r:.100} are not supported: they must be attention (*), MLP (-) and "
            "experts (E), with attention at least once"
        )
    if "E" in pattern and architecture.experts is None:
        raise ValueError(f"MTP layers of pattern {pattern!r} have experts (E), but the model has none")


def several_layers_error(number: int) -> str:
    """Return the message about an MTP layer after the first that has weights of its own."""
    return (
        f"several MTP layers with weights of their own are not supported, and mtp.layers.{number} is not part of the "
        "first"
    )


def found_head(find: Callable[[], Found], mtp: MTPLoading, *, is_named: bool) -> Found | None:
    """Return the head that `find` returns; None, with a warning that says why not, if it raises and `mtp` is "auto".

    Args:
        mtp: With "none", return None without a warning.
        is_named: False to leave out the warning, because the checkpoint does not mention a head.

    Raises:
        ValueError: If `mtp` is "required" and `find` raises.
    """
    if mtp not in get_args(MTPLoading):
        raise ValueError(f"mtp must be 'none', 'auto' or 'required', found {mtp!r}")
    if mtp == "none":
        return None
    try:
        return find()
    except ValueError as error:
        if mtp == "required":
            raise
        if is_named and is_first_rank():
            _LOG.warning("%s", error)
        return None


def _layers(names: Iterable[str]) -> set[int]:
    return {int(found[1]) for name in names if (found := _LAYER.search(name))}
