"""Multi-token prediction (MTP) head: a few layers that predict the token after the next one.

The entry at position t combines the hidden state of token t - 1, after the model's final norm, with token t; its output
predicts token t + 1. The hidden state before position 0 is zero. Keys and values of the entry are stored at t, so those
in a block depend only on tokens up to the end of the block. The output also serves as the hidden state of token t for
one more prediction. Token embeddings and the output layer are the model's.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from ..kernels.attention.interface import AttentionRows, PlannedAttention
from ..kernels.attention.kv_values import KVScales
from .between_layers import LayerNorm
from .linear import OneTokenColumnLinear, PromptTokens, prompt_tokens_of
from .self_attention import CachingSelfAttention


class PackedTokens(Protocol):
    """The packed tokens of a step; `StepBatch` is one."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, without padding."""

    @property
    def positions(self) -> Tensor:
        """[tokens] int64 position of each token in its request."""

    @property
    def token_blocks(self) -> Tensor:
        """[tokens] int32 KV block to which each token is written."""

    @property
    def token_offsets(self) -> Tensor:
        """[tokens] int32 offset inside that block."""

    @property
    def real_tokens(self) -> Tensor | None:
        """[tokens] int32, 0 for padding; None if there is no padding."""

    @property
    def num_exchanged(self) -> int:
        """Number of tokens that each expert-parallel rank exchanges."""

    @property
    def attention(self) -> AttentionRows:
        """Lengths and block table of the requests."""


@dataclass(frozen=True, slots=True)
class MTPStep:
    """One pass of an MTP head; its layers read this object instead of the engine's context.

    Args:
        batch: The tokens of the pass.
        kv_cache: [2, attention layers, blocks, block size, kv heads, head dim]: keys and values of the head's layers.
        attend: Attention over these tokens, planned by the backend of the model's attention.
        max_sequence_length: Number of positions in the rotary table.
        first_prompt: Index of the first prompt token; None if there is none.
    """

    batch: PackedTokens
    kv_cache: Tensor
    attend: PlannedAttention
    max_sequence_length: int
    first_prompt: int | None = None


@dataclass(frozen=True, slots=True)
class RemoteHead:
    """A head on the last pipeline stage, on the other stages, which only receive its drafts."""

    pattern: str


class MTPHead(MegatronModule):
    """Norms of embedding and hidden state, a projection that joins them, and layers that end in a norm.

    Args:
        config: Megatron's configuration of a stack with the head's layers.
        spec: Spec of the stack, the same as the model's.
        pattern: One symbol per layer, as in the model's pattern; without recurrent layers.
        vocab_size: Size of the head's own token embeddings; None if those of the model are on this rank.
    """

    def __init__(self, config: Any, spec: ModuleSpec, pattern: str, vocab_size: int | None = None) -> None:
        super().__init__(config=config)
        groups, size = ProcessGroupCollection.use_mpu_process_groups(), config.hidden_size
        groups.pp = groups.cp  # a group of one rank, because a single pipeline stage has all layers
        self.pattern = pattern
        self.embedding = None
        if vocab_size is not None:
            self.embedding = LanguageModelEmbedding(config, vocab_size, 1, "none", tp_group=groups.tp)
        self.embedding_norm = LayerNorm(config, size, config.layernorm_epsilon)
        self.hidden_norm = LayerNorm(config, size, config.layernorm_epsilon)
        self.joining = OneTokenColumnLinear(
            2 * size,
            size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=True,
            tp_group=groups.tp,
        )
        self.decoder = build_module(spec, config, hybrid_override_pattern=pattern, pg_collection=groups)

    def forward(self, embeddings: Tensor, hidden_states: Tensor, step: MTPStep, rotary: Tensor | None) -> Tensor:
        """Write the keys and values of a step's entries; return their outputs, [tokens, hidden].

        Args:
            embeddings: [tokens, hidden] of each token.
            hidden_states: [tokens, hidden] of the token before each token.
            rotary: Megatron's rotary angles; None for no position embeddings.
        """
        with self._marking_prompts(step.first_prompt):
            context = _HeadContext(step, self.pattern, self._kv_scales)
            output: Tensor = self.decoder(
                self._joined(embeddings, hidden_states),
                attention_mask=None,
                inference_context=context,
                rotary_pos_emb=rotary,
            )
        return output.squeeze(1)

    def write_entries(self, embeddings: Tensor, hidden_states: Tensor, step: MTPStep, rotary: Tensor | None) -> None:
        """Write the keys and values of a step's entries; compute no more of the layers than these need.

        Args:
            embeddings, hidden_states, rotary: As in `forward`.
        """
        if self.pattern.rindex(Symbols.ATTENTION) > 0:
            self(embeddings, hidden_states, step, rotary)
            return
        with self._marking_prompts(step.first_prompt):
            hidden = self.decoder.layers[0].input_layernorm(self._joined(embeddings, hidden_states))
            self._attention[0].write_entries(hidden, _HeadContext(step, self.pattern, self._kv_scales), rotary)

    def _joined(self, embeddings: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the input of the layers, [tokens, 1, hidden]."""
        joined = torch.cat((self.embedding_norm(embeddings), self.hidden_norm(hidden_states)), dim=-1)
        hidden: Tensor = self.joining(joined.unsqueeze(1))[0]
        return hidden

    @cached_property
    def _attention(self) -> tuple[CachingSelfAttention, ...]:
        return tuple(module for module in self.decoder.modules() if isinstance(module, CachingSelfAttention))

    @property
    def _kv_scales(self) -> tuple[KVScales, ...]:
        return tuple(layer.kv_scales for layer in self._attention)

    @cached_property
    def _prompt_tokens(self) -> PromptTokens | None:
        return prompt_tokens_of(self)

    def _marking_prompts(self, first: int | None) -> AbstractContextManager[None]:
        return nullcontext() if self._prompt_tokens is None else self._prompt_tokens.beginning_at(first)


@dataclass(frozen=True, slots=True)
class _HeadContext:
    """The part of the engine's context that layers without states read, for the layers of a head."""

    given: MTPStep
    pattern: str
    scales: tuple[KVScales, ...]

    @property
    def step(self) -> MTPStep:
        return self.given

    @property
    def max_sequence_length(self) -> int:
        return self.given.max_sequence_length

    def is_static_batching(self) -> bool:
        return False

    def route_record(self, layer_number: int) -> None:
        return None  # the experts of drafts are not recorded

    def key_value_cache(self, layer_number: int) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = self.given.kv_cache[:, self._index(layer_number)]
        return keys, values, self.given.batch.attention.block_table

    def kv_scales(self, layer_number: int) -> KVScales:
        return self.scales[self._index(layer_number)]

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales) -> Tensor:
        return self.given.attend(q, k_cache, v_cache, scales)

    def _index(self, layer_number: int) -> int:
        """Return the index among the attention layers of a layer, which are numbered from 1."""
        return self.pattern[: layer_number - 1].count(Symbols.ATTENTION)
