"""Self-attention over the paged KV cache, by the backend that the context chose."""

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor
from typing_extensions import override


class CachingSelfAttention(SelfAttention):
    """Megatron's self-attention with its dynamic-inference kernel replaced.

    Megatron's own forward refuses dynamic batching without flash-attn before it reaches any kernel.
    """

    def __init__(self, config: Any, *args: Any, **settings: Any) -> None:
        super().__init__(config, *args, **settings)
        if config.attention_output_gate:
            raise ValueError("attention_output_gate=True is not supported; set it to False")

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
        query, key, value = self.get_query_key_value_tensors(hidden_states, key_value_states)
        query, key, value, rotary, _, _ = self._adjust_key_value_for_inference(
            inference_context, query, key, value, self._rotary_pair(rotary_pos_emb)
        )
        if rotary is not None:
            query = inference_context.apply_rotary_emb_query(query, rotary[0], self.config, None, self.pg_collection.cp)
        out = inference_context.attend(query.squeeze(1), key, value)
        return self.linear_proj(out.flatten(1).unsqueeze(1))

    def _rotary_pair(self, rotary_pos_emb: Any) -> Any:
        skips = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        if rotary_pos_emb is None or skips:
            return None
        return rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
