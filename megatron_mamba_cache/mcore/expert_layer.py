"""A mixture-of-experts layer whose expert-parallel ranks may have different numbers of tokens."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor
from typing_extensions import override

from .model_ranks import num_expert_ranks


class UnevenAllGatherDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's all-gather dispatcher, which needs equal token counts on all ranks, with padding that no expert gets.

    Ranks that share experts serve different requests here, and some may have none. Reading the largest number of tokens
    waits for the device, as reading how many each expert gets does anyway.
    """

    routing_map: Tensor

    @override
    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> Any:
        """Gather the tokens of all ranks; see Megatron."""
        self._num_tokens = hidden_states.shape[0]
        most = torch.tensor([self._num_tokens], device=hidden_states.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.tp_ep_group)
        rows = (0, 0, 0, int(most) - self._num_tokens)
        self.routing_map = F.pad(self.routing_map, rows)
        return super().token_dispatch(F.pad(hidden_states, rows), F.pad(probs, rows))

    @override
    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Return the outputs of this rank's tokens; see Megatron."""
        return super().token_combine(hidden_states)[: self._num_tokens]


class UnevenMoELayer(MoELayer):
    """Megatron's layer; with expert parallelism and its all-gather dispatcher, ranks' token counts may differ."""

    token_dispatcher: Any

    def __init__(self, config: Any, *args: Any, pg_collection: Any = None, **settings: Any) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **settings)
        if self.ep_group.size() > 1 and isinstance(self.token_dispatcher, MoEAllGatherTokenDispatcher):
            self.token_dispatcher = UnevenAllGatherDispatcher(
                self.num_local_experts,
                self.local_expert_indices,
                config=config,
                pg_collection=pg_collection or get_default_pg_collection(),
            )


def check_expert_layers(model: Any) -> None:
    """Raise `ValueError` if the model's expert-parallel ranks would need the same number of tokens."""
    if num_expert_ranks() == 1 or model.config.moe_token_dispatcher_type != "allgather":
        return
    if any(type(module) is MoELayer for module in model.modules()):
        raise ValueError(
            "moe_token_dispatcher_type is 'allgather', which needs the same number of tokens on each expert-parallel "
            "rank: set it to 'alltoall', or build the model from local_hybrid_spec"
        )
