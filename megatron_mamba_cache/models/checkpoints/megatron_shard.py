"""This rank's shard of a model and of its MTP head, as sharded tensors of a Megatron distributed checkpoint."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.models.mamba.mamba_model import MambaModel
from torch import Tensor

from ...mcore.mtp_head import MTPHead
from ...mcore.stacked_experts import STACKED_PARAMETERS
from ..architecture import HybridArchitecture
from ..rank_shard import EMBEDDINGS, OUTPUT, RankShard
from .checkpoint_writer import is_training_state, take_fused_names
from .common_state import CommonState
from .megatron_head import HEAD, LAYERS, sharded_head


@dataclass(frozen=True, slots=True)
class BuiltShard:
    """This rank's shard of a model and of its head; `head` is None if this rank has none."""

    model: MambaModel
    head: MTPHead | None

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The modules by the prefix of their parameters in a state dict."""
        return {"": self.model} if self.head is None else {"": self.model, HEAD: self.head}


def has_copied_embeddings(architecture: HybridArchitecture) -> bool:
    """Return True if this rank's output weights are a copy of the tied embeddings on the first pipeline stage."""
    part = RankShard.of_process(architecture)
    return part.is_tied and part.is_last_stage and not part.is_first_stage


def wanted_tensors(
    built: BuiltShard, architecture: HybridArchitecture, common: CommonState, stored: Collection[str]
) -> dict[str, Any]:
    """Return the sharded tensors to load, under their stored names, without the extra state for quantized training."""
    metadata = {"singleton_local_shards": common.splits_experts}
    sharded = built.model.sharded_state_dict(metadata=metadata)
    wanted = {name: part for name, part in sharded.items() if not isinstance(part, ShardedObject)}
    if has_copied_embeddings(architecture):
        wanted[OUTPUT].key = EMBEDDINGS
        wanted[OUTPUT].replica_id = (1, *wanted[OUTPUT].replica_id[1:])  # the first stage holds the main replica
    take_fused_names(wanted, "decoder.layers.", len(architecture.pattern), stored)
    if built.head is not None:
        of_head = sharded_head(built.head, metadata)
        take_fused_names(of_head, LAYERS, len(built.head.pattern), stored)
        wanted |= of_head
    return wanted


def stacked_parts(built: BuiltShard, wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return, by name, the tensors to load that are views of one expert in a parameter that stacks all experts."""
    own_names = {f"{prefix}{name}" for prefix, module in built.modules.items() for name in module.state_dict()}
    return {
        name: part.data for name, part in wanted.items() if isinstance(part, ShardedTensor) and name not in own_names
    }


def fill_shard(built: BuiltShard, state: dict[str, Any], stacked: Mapping[str, Tensor]) -> None:
    """Copy loaded tensors to the model and its head; raise `ValueError` unless each parameter has exactly one."""
    for name, part in stacked.items():
        loaded = state.pop(name)
        if loaded.data_ptr() != part.data_ptr():
            part.copy_(loaded)
    of_head = {name: state.pop(name) for name in list(state) if name.startswith(HEAD)}
    _load(built.model, state)
    if built.head is not None:
        _load(built.head, {name.removeprefix(HEAD): loaded for name, loaded in of_head.items()})


def _load(model: torch.nn.Module, state: dict[str, Any]) -> None:
    outcome = model.load_state_dict(state, strict=False)  # extra state may be missing; the check below finds other gaps
    unfilled = [
        name for name in outcome.missing_keys if not is_training_state(name) and not name.endswith(STACKED_PARAMETERS)
    ]
    if unfilled or outcome.unexpected_keys:
        raise ValueError(
            f"the checkpoint has no values for the parameters {unfilled}, and the model has no parameters for the "
            f"tensors {outcome.unexpected_keys}"
        )
