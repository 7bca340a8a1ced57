"""Self-attention over the paged KV cache, by the backend that the context chose."""

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor
from typing_extensions import override

from .supported_settings import check_settings


class CachingSelfAttention(SelfAttention):
    """Megatron's self-attention with its dynamic-inference kernel replaced.

    Megatron's own forward refuses dynamic batching without flash-attn before it reaches any kernel.

    Raises:
        ValueError: If Megatron's layer computes something else; see `check_settings`.
    """

    def __init__(self, config: Any, *args: Any, **settings: Any) -> None:
        check_settings(config)
        super().__init__(config, *args, **settings)
        for name in ("qk_layernorm", "qk_l2_norm"):
            if getattr(config, name) and self.q_layernorm is None:
                raise ValueError(f"{name} is True, but the spec has no norm of queries and keys; set it to False")
        if not type(self.core_attention).__module__.startswith("megatron.core."):
            raise ValueError(
                f"the spec's core_attention is {type(self.core_attention).__qualname__}, which no step would call; "
                "take DotProductAttention"
            )

    @override
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Any = None,
        **settings: Any,
    ) -> Any:
        """Attend hidden_states [tokens, 1, hidden] of a dynamic batch; anything else is Megatron's forward."""
        if inference_context is None or inference_context.is_static_batching():
            return super().forward(
                hidden_states, attention_mask, key_value_states, inference_context, rotary_pos_emb, **settings
            )
        rotary = self._rotary_pair(rotary_pos_emb)
        if rotary is None and self._has_plain_heads():
            out = self._attend_views(hidden_states, inference_context)
        else:
            query, key, value = self.get_query_key_value_tensors(hidden_states, key_value_states)
            query, key, value, rotary, _, _ = self._adjust_key_value_for_inference(
                inference_context, query, key, value, rotary
            )
            if rotary is not None:
                query = inference_context.apply_rotary_emb_query(
                    query, rotary[0], self.config, None, self.pg_collection.cp
                )
            out = inference_context.attend(query.squeeze(1), key, value)
        return self.linear_proj(out.flatten(1).unsqueeze(1))

    def _has_plain_heads(self) -> bool:
        """Return whether queries, keys and values are parts of the joint projection as they are."""
        config = self.config
        has_norms = self.q_layernorm is not None or self.k_layernorm is not None
        return not has_norms and not config.test_mode and config.num_query_groups >= self.world_size

    def _attend_views(self, hidden_states: Tensor, inference_context: Any) -> Tensor:
        """Attend views of the joint projection; the launch that writes the keys also packs the queries."""
        mixed, sizes = self.get_query_key_value_tensors(hidden_states, split_qkv=False)
        query, key, value = mixed.squeeze(1).split(sizes, dim=-1)  # [tokens, kv heads, ...]
        query = query.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        layer = self.layer_number - self._get_pp_layer_offset_for_inference()
        query = inference_context.append_packing(layer, query, key, value)
        return inference_context.attend(query, *inference_context.key_value_cache(layer)[:2])

    def _rotary_pair(self, rotary_pos_emb: Any) -> Any:
        skips = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        if rotary_pos_emb is None or skips:
            return None
        return rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
