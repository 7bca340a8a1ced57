"""Random hybrid models whose recurrent layers are toys."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_mamba_cache.models.random_hybrid import RandomHybridConfig
from megatron_mamba_cache.recurrences.batches import full_sequences
from tests.recurrences.toy import CELLS, CHANNELS, GRAIN, HEADS, KEPT, KINDS, LANES, MEMORIES, ROWS, ToyWeights


@dataclass(frozen=True, slots=True)
class ToyHybridConfig(RandomHybridConfig):
    """Sizes of a random hybrid model whose recurrent layers are toys."""


class ToyMixer(nn.Module):
    """The mixer of a recurrent layer, whose weights depend only on the model's seed and the layer.

    Args:
        layer: Of the whole model, counted from 0; a recurrent one.
        local_number: Of the layer on this rank, counted from 1.
    """

    def __init__(self, sizes: RandomHybridConfig, layer: int, local_number: int = 0) -> None:
        super().__init__()
        number = sizes.pattern[:layer].count("M")
        self.recurrence = KINDS[number % len(KINDS)]
        self.is_first = number < len(KINDS)
        self._local_number = local_number
        generator = torch.Generator().manual_seed(1000 * sizes.seed + layer)
        shapes = {
            "in_proj": (self.recurrence.projected, sizes.hidden_size),
            "out_proj": (sizes.hidden_size, self.recurrence.mixed),
            "taps": (KEPT + 1, CHANNELS),
        }
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator) * (sizes.init_std if name == "in_proj" else 1.0)
            self.register_parameter(name, nn.Parameter(weight.to(sizes.dtype), requires_grad=False))
        decays = 0.5 + 0.4 * torch.rand(HEADS, generator=generator)
        self.decays = nn.Parameter(decays, requires_grad=False)

    @property
    def facts(self) -> tuple[Any, ...]:
        """Settings that decide the mixer's result together with its weights."""
        return self.recurrence, self.is_first

    def forward(self, hidden_states: Tensor, inference_context: Any = None, **_: Any) -> tuple[Tensor, None]:
        """Mix hidden_states [tokens, batch, hidden]; packed tokens have a batch of 1."""
        x = torch.tanh(hidden_states @ self.in_proj.T)
        weights = ToyWeights(self.taps, self.decays, self.is_first)
        if inference_context is None:
            num_tokens, batch, _ = x.shape
            requests = full_sequences(batch, num_tokens, GRAIN, x.device)
            packed = x.transpose(0, 1).flatten(0, 1)
            mixed = self.recurrence.prefill(packed, weights, self.recurrence.no_states(x.dtype), requests)
            return mixed.unflatten(0, (batch, num_tokens)).transpose(0, 1) @ self.out_proj.T, None
        states, step = inference_context.layer_states(self._local_number), inference_context.step.batch
        packed, y = x[:, 0], x.new_zeros(len(x), self.recurrence.mixed)
        first_prefilled = step.num_decode_tokens if step.prefill is not None else len(x)
        if step.decode is not None:
            y[:first_prefilled] = self.recurrence.decode(packed[:first_prefilled], weights, states, step.decode)
        if step.prefill is not None:
            y[first_prefilled:] = self.recurrence.prefill(packed[first_prefilled:], weights, states, step.prefill)
        return (y @ self.out_proj.T)[:, None], None


def put_toys(model: Any, sizes: RandomHybridConfig) -> None:
    """Replace the mixers of this rank's shard of a model by toys."""
    for index, symbol in enumerate(model.decoder.layer_type_list):
        if symbol == "M":
            layer = model.decoder.layers[index]
            layer.mixer = ToyMixer(sizes, layer.layer_number - 1, index + 1)


def toy_state_bytes(sizes: RandomHybridConfig, num_drafts: int = 0, *, is_quantized: bool = False) -> int:
    """Return the bytes of one state over all layers, with slots for `num_drafts` drafts."""
    num_layers, itemsize = sizes.pattern.count("M"), sizes.dtype.itemsize
    num_matrices, num_vectors = (num_layers + 1) // 2, num_layers // 2
    window = (KEPT + num_drafts) * CHANNELS * itemsize
    matrix = HEADS * ROWS * LANES + 4 * HEADS * LANES if is_quantized else 4 * HEADS * ROWS * LANES
    of_slot = CHANNELS * itemsize if num_matrices else 0
    return num_matrices * (window + matrix + 8 * MEMORIES) + of_slot + num_vectors * 4 * CELLS
