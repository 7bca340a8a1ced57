"""Read and write a model's architecture as a JSON file in the directory of a Megatron checkpoint."""

import json
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from ..architecture import ACTIVATIONS, GatedDeltaSizes, HybridArchitecture, MambaSizes
from .checkpoint_config import MOST_EXPERTS, CheckpointConfig, read_json_object

ARCHITECTURE_FILE = "hybrid_architecture.json"

_MAMBA, _GATED_DELTA = "mamba", "gated_delta"
"""Names of the sections for the dimensions of recurrent layers; a file has one of them."""


def write_architecture(architecture: HybridArchitecture, directory: Path) -> None:
    """Write an architecture to `hybrid_architecture.json` in a checkpoint directory."""
    kind = _MAMBA if isinstance(architecture.recurrent, MambaSizes) else _GATED_DELTA
    sections = {kind if name == "recurrent" else name: value for name, value in asdict(architecture).items()}
    text = json.dumps(sections, indent=2)
    (directory / ARCHITECTURE_FILE).write_text(f"{text}\n", encoding="utf-8")


def read_architecture(directory: Path) -> HybridArchitecture:
    """Read the architecture from `hybrid_architecture.json` in a checkpoint directory.

    Raises:
        ValueError: If the file cannot be read, or a field is missing or of the wrong type; the message names the file
            and the field.
    """
    path = directory / ARCHITECTURE_FILE
    found: HybridArchitecture = _read(HybridArchitecture, CheckpointConfig(read_json_object(path), str(path)))
    return found


def _read(sizes: type[Any], section: CheckpointConfig) -> Any:
    """Build an instance of the dataclass `sizes` from a section of the file; absent fields get their defaults."""
    hints, found = get_type_hints(sizes), {}
    for field in fields(sizes):
        name = field.name
        kind, *others = get_args(hints[name]) or (hints[name],)
        if section.has(name) or (field.default is MISSING and NoneType not in others):
            read = _BY_NAME.get(name) or _BY_TYPE.get(kind)
            found[name] = _read(kind, section.section(name)) if read is None else read(section, name)
        elif field.default is MISSING:
            found[name] = None
    return sizes(**found)


def _recurrent(section: CheckpointConfig, _: str) -> MambaSizes | GatedDeltaSizes:
    if section.has(_MAMBA) and section.has(_GATED_DELTA):
        raise section.error(f"the file has both sections {_MAMBA!r} and {_GATED_DELTA!r}, but must have only one")
    name, kind = (_GATED_DELTA, GatedDeltaSizes) if section.has(_GATED_DELTA) else (_MAMBA, MambaSizes)
    found: MambaSizes | GatedDeltaSizes = _read(kind, section.section(name))
    return found


_BY_TYPE: dict[type, Callable[..., Any]] = {
    int: CheckpointConfig.integer,
    float: CheckpointConfig.number,
    bool: CheckpointConfig.flag,
    str: CheckpointConfig.text,
}
_BY_NAME: dict[str, Callable[..., Any]] = {
    "recurrent": _recurrent,
    "activation": partial(CheckpointConfig.one_of, allowed=ACTIVATIONS),
    "score": partial(CheckpointConfig.one_of, allowed=("sigmoid", "softmax")),
    "num_experts": partial(CheckpointConfig.integer, most=MOST_EXPERTS),
    "time_step_limit": CheckpointConfig.limits,
    **dict.fromkeys(("input_multiplier", "residual_multiplier", "output_multiplier"), CheckpointConfig.factor),
}
