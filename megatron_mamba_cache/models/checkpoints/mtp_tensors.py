"""Find the tensors of a multi-token prediction (MTP) head in a checkpoint."""

import logging
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

from ..architecture import HybridArchitecture
from ..mtp_head import head_architecture
from ..placement import Placements
from .checkpoint_config import CheckpointConfig
from .stored_names import OtherNames, StoredTensors, is_first_rank, num_mtp_layers

MTPLoading = Literal["none", "auto", "required"]
"""When to load an MTP head: never, if the checkpoint has one that is supported, or always."""

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
    if mtp not in get_args(MTPLoading):
        raise ValueError(f"mtp must be 'none', 'auto' or 'required', found {mtp!r}")
    if mtp == "none":
        return None
    try:
        head = _supported(module, config, architecture, names)
    except ValueError as error:
        if mtp == "required":
            raise
        if is_first_rank() and (names or num_mtp_layers(config)):
            _LOG.warning("%s", error)
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
    if _ATTENTION not in pattern or set(pattern) - _SYMBOLS:
        raise config.error(
            f"MTP layers of pattern {pattern!r:.100} are not supported: they must be attention (*), MLP (-) and "
            "experts (E), with attention at least once"
        )
    if "E" in pattern and architecture.experts is None:
        raise config.error(f"MTP layers of pattern {pattern!r} have experts (E), but the model has none")
    head = head_architecture(architecture, pattern)
    placements: Placements = module.mtp_placements(head)
    if more := sorted(_layers(names) - _layers(placements)):
        raise config.error(
            f"several MTP layers with weights of their own are not supported, and mtp.layers.{more[0]} is not part of "
            f"the first, {pattern!r}"
        )
    return head


def _layers(names: Iterable[str]) -> set[int]:
    return {int(found[1]) for name in names if (found := _LAYER.search(name))}
