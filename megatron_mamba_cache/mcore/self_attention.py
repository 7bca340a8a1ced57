"""Self-attention over the paged KV cache with the backend that the context selected."""

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from ..kernels.attention.attention_inputs import write_attention_inputs
from ..kernels.attention.head_changes import HeadChanges, HeadNorms, Rotation
from ..kernels.attention.kv_append import append_kv
from ..kernels.attention.kv_values import UNSCALED
from ..kernels.attention.output_gate import gate_output
from .between_layers import LayerRMSNorm
from .megatron_settings import check_settings

_TABLES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Rotation tables by dtype, for each tensor of Megatron's rotary angles; freed together with the angles."""


class CachingSelfAttention(SelfAttention):
    """Megatron's self-attention with our kernels for dynamic batches.

    Megatron's own forward pass rejects dynamic batches if flash-attn is not installed. With more tensor-parallel ranks
    than KV heads, Megatron gathers the outputs of `linear_qkv` from all ranks; here, each rank has some query heads and
    a copy of their KV head instead. Checkpoints contain one copy.

    Attributes:
        kv_scales: Scales of this layer's keys and values in an FP8 KV cache.

    Raises:
        ValueError: If a setting is not supported; see `check_settings`.
    """

    def __init__(self, config: Any, *args: Any, pg_collection: Any = None, **settings: Any) -> None:
        check_settings(config)
        tensor_ranks = pg_collection.tp if pg_collection else parallel_state.get_tensor_model_parallel_group()
        self._ranks_of_kv_head = max(1, tensor_ranks.size() // config.num_query_groups)
        if self._ranks_of_kv_head > 1:
            config = copy.copy(config)
            config.num_query_groups = tensor_ranks.size()
        super().__init__(config, *args, pg_collection=pg_collection, **settings)
        self.kv_scales = UNSCALED
        for name in ("qk_layernorm", "qk_l2_norm"):
            if getattr(config, name) and self.q_layernorm is None:
                raise ValueError(f"{name} is True, but the spec has no norm for queries and keys; set it to False")
        if not type(self.core_attention).__module__.startswith("megatron.core."):
            raise ValueError(
                f"the spec's core_attention is {type(self.core_attention).__qualname__}, which would never be called; "
                "use DotProductAttention"
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
        """Run attention on a dynamic batch [tokens, 1, hidden]; use Megatron's forward pass for other inputs."""
        if inference_context is None or inference_context.is_static_batching():
            return super().forward(
                hidden_states, attention_mask, key_value_states, inference_context, rotary_pos_emb, **settings
            )
        rotary = self._rotary_pair(rotary_pos_emb)
        if self._is_computed_by_head(rotary):
            out, gate = self._attend_views(hidden_states, inference_context, None if rotary is None else rotary[0])
        else:
            query, key, value, *gates = self.get_query_key_value_tensors(
                hidden_states, output_gate=self.config.attention_output_gate
            )
            query, key, value, rotary, _, _ = self._adjust_key_value_for_inference(
                inference_context, query, key, value, rotary
            )
            if rotary is not None:
                query = inference_context.apply_rotary_emb_query(
                    query, rotary[0], self.config, None, self.pg_collection.cp
                )
            layer = self.layer_number - self._get_pp_layer_offset_for_inference()
            out = inference_context.attend(query.squeeze(1), key, value, inference_context.kv_scales(layer))
            gate = gates[0] if gates else None
        if gate is not None:
            out = gate_output(out, gate)
        return self.linear_proj(out.flatten(1).unsqueeze(1))

    def _is_computed_by_head(self, rotary: Any) -> bool:
        """Return whether one kernel can read the heads from the output of `linear_qkv` and apply norms and rotation."""
        config, norms = self.config, (self.q_layernorm, self.k_layernorm)
        has_kernel = norms == (None, None) or all(type(norm) is LayerRMSNorm for norm in norms)
        if rotary is not None:
            is_plain = not config.rotary_interleaved and not config.apply_rope_fusion
            has_kernel = has_kernel and is_plain and rotary[0] is rotary[1]
        return has_kernel and not config.test_mode

    def _attend_views(
        self, hidden_states: Tensor, inference_context: Any, angles: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run attention on views of the output of `linear_qkv`; return its result, and the gates or None."""
        queries, gates = self._write_views(hidden_states, inference_context, angles)
        layer = self.layer_number - self._get_pp_layer_offset_for_inference()
        k_cache, v_cache, _ = inference_context.key_value_cache(layer)
        return inference_context.attend(queries, k_cache, v_cache, inference_context.kv_scales(layer)), gates

    def write_entries(self, hidden_states: Tensor, inference_context: Any, rotary_pos_emb: Any) -> None:
        """Write the keys and values of a dynamic batch [tokens, 1, hidden] without attention.

        The layer must have the norms and the kind of rotation that `_is_computed_by_head` accepts.
        """
        rotary = self._rotary_pair(rotary_pos_emb)
        self._write_views(hidden_states, inference_context, None if rotary is None else rotary[0])

    def _write_views(
        self, hidden_states: Tensor, inference_context: Any, angles: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Write the keys and values in the output of `linear_qkv`; return the queries, and the gates or None."""
        mixed, _ = self.linear_qkv(hidden_states)
        dim, num_groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        queries = self.num_attention_heads_per_partition // num_groups
        counts = (queries, queries, 1, 1) if self.config.attention_output_gate else (queries, 1, 1)
        heads = mixed.view(len(mixed), num_groups, sum(counts), dim)  # [tokens, kv heads, heads, dim]
        query, *gates, key, value = heads.split(counts, dim=2)
        layer = self.layer_number - self._get_pp_layer_offset_for_inference()
        k_cache, v_cache, _ = inference_context.key_value_cache(layer)
        batch = inference_context.step.batch
        keys, values = (new.squeeze(2)[: batch.num_tokens] for new in (key, value))
        targets = k_cache, v_cache, batch.token_blocks, batch.token_offsets
        scales = inference_context.kv_scales(layer)
        changes = self._head_changes(batch.positions, None if angles is None else rotation_table(angles, query.dtype))
        if changes is None:
            packed: Any = append_kv(keys, values, *targets, query, scales)
        else:
            packed = write_attention_inputs(query, keys, values, *targets, changes, scales)
        return packed, gates[0] if gates else None

    def _head_changes(self, positions: Tensor, table: Tensor | None) -> HeadChanges | None:
        """Return the norms and rotation to apply to queries and keys; None if there are neither."""
        query, key = self.q_layernorm, self.k_layernorm
        if query is None and table is None:
            return None
        return HeadChanges(
            None if query is None else HeadNorms(query.weight, key.weight, query.eps, query.offset),
            None if table is None else Rotation(table, positions),
        )

    @override
    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weights as sharded tensors; copies of a KV head are marked as replicas."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for key in (f"{prefix}linear_qkv.{name}" for name in ("weight", "bias")):
            if self._ranks_of_kv_head > 1 and key in state:
                state[key] = self._sharded_by_head(state[key], sharded_offsets)
        return state

    def _sharded_by_head(self, rows: ShardedTensor, sharded_offsets: tuple) -> ShardedTensorFactory:
        """Return a factory that splits the rows of `linear_qkv` into one sharded tensor per head."""
        axis = len(sharded_offsets)
        total, heads = self._heads_of_layer()

        @torch.no_grad()
        def build(key: str, local: Tensor, replica_id: tuple[int, ...], _: Any) -> list[ShardedTensor]:
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    part,
                    *sharded_offsets,
                    (axis, head, total),
                    replica_id=(number, *replica_id[1:]),
                    prepend_axis_num=axis,
                )
                for part, (head, number) in zip(local.chunk(len(heads)), heads, strict=True)
            ]

        return ShardedTensorFactory(rows.key, rows.data, build, torch.cat, rows.replica_id)

    def _heads_of_layer(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the total number of heads in `linear_qkv`, and (index, copy number) of each head on this rank."""
        group, number = divmod(self.pg_collection.tp.rank(), self._ranks_of_kv_head)
        here, kinds = self.num_attention_heads_per_partition, 2 if self.config.attention_output_gate else 1
        of_kind = here * self._ranks_of_kv_head  # number of query heads (and of gates) per KV head
        of_group = kinds * of_kind + 2
        queries = [kind * of_kind + number * here + head for kind in range(kinds) for head in range(here)]
        heads = [(head, 0) for head in queries] + [(of_group - 2, number), (of_group - 1, number)]
        num_groups = self.world_size // self._ranks_of_kv_head
        return num_groups * of_group, [(group * of_group + head, copied) for head, copied in heads]

    def _rotary_pair(self, rotary_pos_emb: Any) -> Any:
        skips = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        if rotary_pos_emb is None or skips:
            return None
        return rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)


def rotation_table(angles: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cosines and sines of Megatron's rotary angles, as `Rotation` needs them, in the given dtype.

    The table is cached as long as `angles` is alive.

    Args:
        angles: [positions, 1, 1, 2 * half]; the second half repeats the first.
    """
    tables = _TABLES.setdefault(angles, {})
    if dtype not in tables:
        half = angles.flatten(1)[:, : angles.shape[-1] // 2]
        tables[dtype] = torch.stack((half.cos(), half.sin()), dim=1).to(dtype)
    found: Tensor = tables[dtype]
    return found
