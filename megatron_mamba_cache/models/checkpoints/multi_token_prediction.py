"""Layers for multi-token prediction (MTP) in checkpoints: recognized by name, left out with a warning."""

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from .checkpoint_config import CheckpointConfig

MTP_LAYERS = "layers for multi-token prediction (MTP), which is not used yet"
"""What a warning says of them."""

_LOG = logging.getLogger(__name__)
_NAMED_SO = re.compile(r"(language_model\.|model\.|backbone\.)*(mtp|mtp_layers|mtp_block)\.")
_LAYER = re.compile(r"(?:language_model\.|model\.|backbone\.)*layers\.(\d+)\.")
_NUM_LAYERS_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers")


def mtp_names(unknown: Iterable[str], known: Iterable[str] = (), num_mtp_layers: int = 0) -> list[str]:
    """Return, in order, which of the tensors that a model has no place for belong to MTP layers.

    Args:
        known: Names of the model's own tensors.
        num_mtp_layers: MTP layers that may follow the model's layers under ordinary layer names, as in some families.
    """
    num_layers = 1 + max((_layer_of(name) for name in known), default=-1)
    following = range(num_layers, num_layers + num_mtp_layers)
    return sorted(name for name in unknown if _NAMED_SO.match(name) or _layer_of(name) in following)


def num_mtp_layers(config: CheckpointConfig) -> int:
    """Return how many MTP layers a Hugging Face configuration names."""
    return max(config.integer(name, 0, least=0) for name in _NUM_LAYERS_FIELDS)


def warn_of_left_out(source: Path, num_tensors: int, what: str = MTP_LAYERS) -> None:
    """Warn, on the first rank only, if any tensors of a checkpoint are left out."""
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if num_tensors and is_first:
        _LOG.warning("%s has %s; their %d tensors are left out", source, what, num_tensors)


def _layer_of(name: str) -> int:
    """Return the number of a tensor's layer; -1 for a tensor outside the layers."""
    layer = _LAYER.match(name)
    return -1 if layer is None else int(layer[1])
