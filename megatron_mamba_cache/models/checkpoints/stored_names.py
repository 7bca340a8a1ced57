"""Find a model family's tensors in checkpoint files, under the names that any version of transformers writes."""

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..placement import Placement, Placements, stacked
from .checkpoint_config import CheckpointConfig

MTP_LAYERS = "layers for multi-token prediction (MTP), which are not used"
"""Description of MTP layers in warnings."""

_LOG = logging.getLogger(__name__)
_NAMED_SO = re.compile(r"(language_model\.|model\.|backbone\.)*(mtp|mtp_layers|mtp_block)\.")
_LAYER = re.compile(r"(?:language_model\.|model\.|backbone\.)*layers\.(\d+)\.")
_NUM_LAYERS_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers")


def mtp_names(unknown: Iterable[str], known: Iterable[str] = (), num_mtp_layers: int = 0) -> list[str]:
    """Return the sorted names of those tensors in `unknown` that belong to MTP (multi-token prediction) layers.

    Args:
        known: Names of the tensors that the model uses.
        num_mtp_layers: Number of MTP layers that may be stored as ordinary layers after the layers of the model.
    """
    num_layers = 1 + max((_layer_of(name) for name in known), default=-1)
    following = range(num_layers, num_layers + num_mtp_layers)
    return sorted(name for name in unknown if _NAMED_SO.match(name) or _layer_of(name) in following)


def num_mtp_layers(config: CheckpointConfig) -> int:
    """Return the number of MTP layers that a Hugging Face configuration declares."""
    return max(config.integer(name, 0, least=0) for name in _NUM_LAYERS_FIELDS)


def is_first_rank() -> bool:
    """Return True on global rank 0, or if torch.distributed is not initialized."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def warn_of_left_out(source: Path, num_tensors: int, what: str = MTP_LAYERS) -> None:
    """Log a warning, on the first rank only, that `num_tensors` tensors are ignored; do nothing if it is 0."""
    if num_tensors and is_first_rank():
        _LOG.warning("%s has %s; their %d tensors are left out", source, what, num_tensors)


def _layer_of(name: str) -> int:
    """Return the layer index in a tensor name; -1 if the name has none."""
    layer = _LAYER.match(name)
    return -1 if layer is None else int(layer[1])


@dataclass(frozen=True, slots=True)
class OtherNames:
    """Rules that derive alternative tensor names from the usual names in a family's placements.

    Args:
        parts: Part of a usual name → strings that may replace it in other versions.
        stacks: Part of an expert tensor's name, with `{}` for the expert's number → replacement that gives the name of
            the tensor that stacks all experts.
        prefixes: Prefixes that may precede each name.
        left_out: Name prefixes of tensors to ignore, because they belong to other parts of a multimodal model.
    """

    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("",)
    left_out: tuple[str, ...] = ()

    def of(self, name: str) -> list[str]:
        """Return all possible names of a tensor, the usual name first."""
        names = [name]
        for part, others in self.parts.items():
            names += [known.replace(part, other, 1) for known in names if part in known for other in others]
        return list(dict.fromkeys(f"{prefix}{known}" for prefix in self.prefixes for known in names))

    def of_stack(self, name: str) -> list[str]:
        """Return all possible names of the stack that contains an expert's tensor; empty if no rule matches."""
        for part, stack in self.stacks.items():
            before, after = map(re.escape, part.split("{}"))
            if one := re.search(rf"{before}\d+{after}", name):
                return self.of(f"{name[: one.start()]}{stack}{name[one.end() :]}")
        return []


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Result of looking up a model family's tensors in checkpoint files.

    Attributes:
        placements: Stored name → destinations.
        missing: Likeliest name of each missing tensor → all names that were tried.
    """

    placements: Placements
    missing: Mapping[str, list[str]]

    @staticmethod
    def find(placements: Placements, names: Collection[str], others: OtherNames, directory: Path) -> "StoredTensors":
        """Look up the tensors in `placements` among the stored names.

        Args:
            placements: Usual name → destinations.
            names: Names of all tensors in the files.
            others: Rules for alternative names.
            directory: Directory that error messages name.

        Raises:
            ValueError: If two stored tensors are the same tensor of the model; the message names both.
        """
        found: dict[str, tuple[Placement, ...]] = {}
        stacks: dict[str, list[Placement]] = {}
        missing: dict[str, list[str]] = {}
        for usual, targets in placements.items():
            single, of_stack = others.of(usual), others.of_stack(usual)
            present = [name for name in (*single, *of_stack) if name in names]
            if len(present) > 1:
                raise ValueError(f"{directory}: the checkpoint has {present[0]} and {present[1]}; remove one of them")
            if not present:
                missing[usual] = single + of_stack
            elif present[0] in of_stack:
                stacks.setdefault(present[0], []).extend(targets)
            else:
                found[present[0]] = targets
        found |= {name: stacked(targets) for name, targets in stacks.items()}
        beginnings = Counter(name.partition("layers.")[0] for name in found if "layers." in name)
        most = max(beginnings, key=beginnings.__getitem__, default="")
        return StoredTensors(found, dict(_named_alike(f"{most}layers.", tried) for tried in missing.values()))


def _named_alike(beginning: str, tried: list[str]) -> tuple[str, list[str]]:
    """Choose the first name that starts with `beginning`, or else the first name.

    Return the choice, and a list of all names with the choice moved to the front.
    """
    name = next((name for name in tried if name.startswith(beginning)), tried[0])
    return name, [name, *(other for other in tried if other != name)]
