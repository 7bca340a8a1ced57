"""MoE layer of a hybrid model, which does not synchronize with the host."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from typing_extensions import override

from ..kernels.experts.overlapped_expert import OverlappedExpert, shared_gemm, takes_shared_gemm
from ..kernels.experts.quantized_experts import QuantizedSharedExpert
from ..kernels.experts.routed_experts import SharedExpert
from ..kernels.experts.router_logits import router_logits
from ..kernels.experts.routing import route
from ..kernels.experts.routing_rule import RouteRecord, RoutingRule, SharedGate
from ..step.batch import StepBatch
from ..step.expert_exchange import ExpertExchange, exchange_among
from .expert_settings import check_megatrons_experts, checked_routing
from .feed_forward import fused_activation
from .linear import product
from .model_ranks import num_expert_ranks
from .stacked_experts import StackedExperts


class ExpertLayer(TransformerLayer):
    """MoE layer with norm and residual; Megatron's base class builds the submodules."""

    mlp: "MixtureOfExperts"

    @override
    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, inference_context: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Run the layer on a dynamic batch [tokens, 1, hidden], or on tokens of any other shape without padding."""
        is_dynamic = inference_context is not None and not inference_context.is_static_batching()
        batch = inference_context.step.batch if is_dynamic else None
        record = inference_context.route_record(self.layer_number) if is_dynamic else None
        output = self.mlp(self.pre_mlp_layernorm(hidden_states), batch, record)
        add = self.mlp_bda(self.training, self.config.bias_dropout_fusion)
        return add((output, None), hidden_states, self.hidden_dropout), None


class Router(MegatronModule):
    """Router that chooses the experts for each token.

    Attributes:
        weight: [experts, hidden].
        expert_bias: [experts] float32, added to the scores to choose experts, but not to weight them; None: no
            bias.
    """

    expert_bias: Tensor | None

    def __init__(self, config: Any, rule: RoutingRule) -> None:
        super().__init__(config=config)
        device, num_experts = torch.cuda.current_device(), config.num_moe_experts
        weight = torch.empty(num_experts, config.hidden_size, device=device, dtype=config.params_dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        has_bias = config.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", torch.zeros(num_experts, device=device) if has_bias else None)
        self._rule = rule

    def forward(
        self,
        x: Tensor,
        is_real: Tensor | None,
        gate_weight: Tensor | None = None,
        record: RouteRecord | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen experts of tokens x [tokens, hidden], and their weights; see `route`.

        Args:
            is_real: [tokens] int32, 0 for padding tokens; None if there are none.
            gate_weight: Weight of the shared expert's gate, whose value is added as the last column of the weights;
                None: no such column.
            record: Memory to which the experts are also written; None: they are not recorded.
        """
        shared = None if gate_weight is None else SharedGate(x, gate_weight)
        return route(router_logits(x, self.weight), self.expert_bias, self._rule, is_real, shared, record)


class Projection(MegatronModule):
    """Linear layer without a bias; its weight, [outputs, inputs], is the same on every rank."""

    def __init__(self, config: Any, num_inputs: int, num_outputs: int) -> None:
        super().__init__(config=config)
        weight = torch.empty(num_outputs, num_inputs, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, [tokens, outputs], for x [tokens, inputs]."""
        return product(x, self.weight)


class MixtureOfExperts(MegatronModule):
    """Router, routed experts, and a shared expert that processes every token.

    Expert-parallel ranks serve different requests. Each rank runs its own experts on the tokens of all these ranks.

    Args:
        submodules: Contains Megatron's spec for `shared_experts`.
        routing: Rule that routes each token to experts; None derives it from the configuration.

    Raises:
        ValueError: If the experts cannot be divided evenly between the ranks, or a setting is not supported.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int | None = None,
        pg_collection: Any = None,
        routing: RoutingRule | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or get_default_pg_collection()
        rule = checked_routing(config, groups, routing)
        self._tensor_ranks = groups.tp
        self.exchange = exchange_among(groups.ep) if groups.ep.size() > 1 else None
        self.router = Router(config, rule)
        self.experts = StackedExperts(config, groups)
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = build_module(
                submodules.shared_experts, config=config, pg_collection=groups, gate=config.moe_shared_expert_gate
            )
            # The shared output is summed over ranks together with the routed output.
            self.shared_experts.linear_fc2.explicit_expert_comm = True
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if config.moe_latent_size:
            self.fc1_latent_proj = Projection(config, config.hidden_size, config.moe_latent_size)
            self.fc2_latent_proj = Projection(config, config.moe_latent_size, config.hidden_size)

    def forward(
        self, hidden_states: Tensor, batch: StepBatch | None = None, record: RouteRecord | None = None
    ) -> Tensor:
        """Return the layer's output for hidden_states [..., hidden], without the residual.

        Args:
            batch: Step that contains the tokens; experts skip its padding tokens. With None, no token is padding, and
                all expert-parallel ranks must have the same number of tokens.
            record: Memory to which this layer's experts of the step's tokens are written; None: they are not recorded.
        """
        x = hidden_states.flatten(0, -2)
        taken_along = self._taken_along(x)
        if taken_along is None:
            out = self._routed_and_shared(x, hidden_states, batch, record)
        else:
            ids, weights = self.router(x, None if batch is None else batch.real_tokens, self._summed_gate, record)
            out = self.experts(x, ids, weights, shared=taken_along)
        if self._tensor_ranks.size() > 1:
            out = reduce_from_tensor_model_parallel_region(out, group=self._tensor_ranks)
        return out.view(hidden_states.shape)

    def _taken_along(self, x: Tensor) -> SharedExpert | QuantizedSharedExpert | None:
        """Return the shared expert's weights if the kernels of the routed experts also compute it, otherwise None."""
        if self.shared_experts is None or self.fc1_latent_proj is not None or self.exchange is not None:
            return None
        weights = self.shared_experts.weights()
        return weights if weights is not None and self.experts.takes(weights, x) else None

    @property
    def _summed_gate(self) -> Tensor | None:
        """Weight of the shared expert's gate if the kernel that sums the expert outputs applies it, otherwise None."""
        if self.shared_experts is None or self.fc1_latent_proj is not None or self.exchange is not None:
            return None
        weight: Tensor | None = self.shared_experts.gate_weight
        return weight

    def _routed_and_shared(
        self, x: Tensor, hidden_states: Tensor, batch: StepBatch | None, record: RouteRecord | None
    ) -> Tensor:
        shared, experts = None, self.shared_experts
        if experts is not None:
            shared = OverlappedExpert(lambda: self._begin_shared(experts, x, hidden_states), x.device)
        if self.fc2_latent_proj is None:
            return self._routed(x, batch, record, shared, None if shared is None else shared.output)
        routed = self.fc2_latent_proj(self._routed(x, batch, record, shared, None))
        return routed if shared is None else routed + shared.output()

    def _begin_shared(self, experts: Any, x: Tensor, hidden_states: Tensor) -> Callable[[], Tensor]:
        """Launch the part of the shared expert that overlaps routing; return a function that computes the rest."""
        compute = experts if self._summed_gate is None else experts.ungated
        gates_itself = experts.gate_weight is not None and self._summed_gate is None
        weights = None if gates_itself or self.exchange is not None else experts.weights()
        activation = fused_activation(self.config)
        if not isinstance(weights, SharedExpert) or not takes_shared_gemm(x, weights.first, activation):
            return lambda: compute(hidden_states).flatten(0, -2)
        inner, second = shared_gemm(x, weights.first, activation), weights.second
        return lambda: F.linear(inner, second)

    def _routed(
        self,
        x: Tensor,
        batch: StepBatch | None,
        record: RouteRecord | None,
        shared: OverlappedExpert | None,
        addend: Callable[[], Tensor] | None,
    ) -> Tensor:
        """Return the weighted sum of expert outputs for each token, plus the addend, [tokens, latent size or hidden].

        With expert parallelism, each rank gathers the tokens from all ranks, routes them, and returns the outputs of
        its experts. All ranks exchange equally many tokens, so no step waits for the host.

        Args:
            shared: Shared expert, which runs concurrently; None if there is none.
            addend: Function that returns a tensor to add to the sum; None: nothing is added.
        """
        is_real = None if batch is None else batch.real_tokens
        if self.exchange is None:
            return self._of_experts_here(x, is_real, record, shared, addend)
        if shared is not None:
            shared.launch(after_queued=False)
        num_exchanged = len(x) if batch is None else batch.num_exchanged
        everyone = self.exchange.gather(x, num_exchanged)
        if record is not None:
            record = record._replace(first=self.exchange.rank * num_exchanged)
        partial = self._of_experts_here(everyone, self.exchange.real_tokens(batch), record, None, None)
        return self.exchange.combine(partial, len(x), None if addend is None else addend())

    def _of_experts_here(
        self,
        x: Tensor,
        is_real: Tensor | None,
        record: RouteRecord | None,
        shared: OverlappedExpert | None,
        addend: Callable[[], Tensor] | None,
    ) -> Tensor:
        ids, weights = self.router(x, is_real, self._summed_gate, record)
        return self.experts(
            x if self.fc1_latent_proj is None else self.fc1_latent_proj(x), ids, weights, addend, overlapped=shared
        )


def exchange_of(model: Any) -> ExpertExchange | None:
    """Return the `ExpertExchange` that the model's MoE layers share; None without expert parallelism."""
    layers = (module for module in model.modules() if isinstance(module, MixtureOfExperts))
    return next((layer.exchange for layer in layers), None)


def waits_for_experts(model: Any) -> bool:
    """Return whether the model has an MoE layer that synchronizes with the host, as Megatron's does."""
    return any(isinstance(module, MoELayer) for module in model.modules())


def check_expert_layers(model: Any) -> None:
    """Raise `ValueError` if the model has Megatron's MoE layers with settings that are not supported.

    Unsupported are settings that make a token's output depend on the rest of the batch, and a dispatcher that needs
    equally many tokens on each rank.
    """
    if not waits_for_experts(model):
        return
    check_megatrons_experts(model.config)
    if num_expert_ranks() > 1 and model.config.moe_token_dispatcher_type == "allgather":
        raise ValueError(
            "moe_token_dispatcher_type is 'allgather', which needs the same number of tokens on each expert-parallel "
            "rank: set it to 'alltoall', or build the model from local_hybrid_spec"
        )
