"""Multi-token prediction (MTP) head in a Megatron distributed checkpoint."""

import re
from collections.abc import Collection
from typing import Any

from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping

from ...mcore.mtp_head import MTPHead
from ..architecture import HybridArchitecture
from ..mtp_head import head_architecture
from ..rank_shard import EMBEDDINGS
from .mtp_tensors import check_pattern, several_layers_error
from .stored_names import mtp_names

HEAD = "mtp."
"""Prefix of the names of a head's parameters in state dicts that also have those of the model."""
LAYERS = "mtp.layers.0.mtp_model_layer.layers."
_STORED = {
    "embedding_norm.": "mtp.layers.0.enorm.",
    "hidden_norm.": "mtp.layers.0.hnorm.",
    "joining.": "mtp.layers.0.eh_proj.",
    "decoder.final_norm.": "mtp.layers.0.final_layernorm.",
    "decoder.layers.": LAYERS,
}
"""Prefixes of parameters in `MTPHead` → prefixes of their names in a checkpoint."""
_SYMBOLS = {"self_attention.": "*", "mlp.router.": "E", "mlp.experts.": "E", "mlp.linear_fc1.": "-", "mixer.": "M"}
_OUTER = re.compile(r"mtp\.layers\.(\d+)\.")
_INNER = re.compile(rf"{re.escape(LAYERS)}(\d+)\.(.*)")


def stored_head(architecture: HybridArchitecture, stored: Collection[str], path: Any) -> HybridArchitecture:
    """Return the architecture of the head with these tensors; raise `ValueError` if there is none or no supported one.

    Args:
        architecture: The model's architecture.
        stored: Names of all tensors in the checkpoint.
        path: Directory of the checkpoint, for messages.
    """
    if not mtp_names(stored):
        raise ValueError(f"{path} has no tensors of MTP layers; drafts need another drafter")
    if more := sorted({int(found[1]) for name in stored if (found := _OUTER.match(name))} - {0}):
        raise ValueError(f"{path}: {several_layers_error(more[0])}")
    symbols: dict[int, str] = {}
    for name in stored:
        if found := _INNER.match(name):
            symbol = next((symbol for part, symbol in _SYMBOLS.items() if found[2].startswith(part)), None)
            if symbol is not None:
                symbols[int(found[1])] = symbol
    if not symbols:
        raise ValueError(f"{path} has MTP layers that are not stored as {LAYERS}*; drafts need another drafter")
    pattern = "".join(symbols.get(number, "?") for number in range(1 + max(symbols)))
    try:
        check_pattern(pattern, architecture)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return head_architecture(architecture, pattern)


def sharded_head(head: MTPHead, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a head's sharded tensors under their stored names, keyed by parameter names with the prefix `HEAD`.

    A copy of the token embeddings has the name of the model's, of which it is a replica.
    """
    state = head.sharded_state_dict(metadata=metadata)
    parts = {name: part for name, part in state.items() if not isinstance(part, ShardedObject)}
    apply_prefix_mapping(parts, _STORED)
    if EMBEDDINGS in parts:  # the first stage has the main replica
        parts[EMBEDDINGS].replica_id = (1, *parts[EMBEDDINGS].replica_id[1:])
    return {f"{HEAD}{name}": part for name, part in parts.items()}
