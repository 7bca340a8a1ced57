"""For code that runs on a rank: parallel layouts, tiny sharded models, and the fp64 reference of a whole model."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import Tensor

from megatron_mamba_cache.mcore.model_ranks import ranks_of_process
from megatron_mamba_cache.mcore.model_reading import model_shape_of
from megatron_mamba_cache.models.random_hybrid import (
    RandomHybridConfig,
    random_architecture,
    random_weights,
)
from megatron_mamba_cache.recurrences.interface import StateDtypes, StateGroup
from megatron_mamba_cache.recurrences.layout import SlotLayout
from megatron_mamba_cache.recurrences.model_shape import HybridModelShape
from tests.mcore import engine_runs
from tests.mcore.engine_runs import Hybrid, build_model
from tests.mcore.mtp_drafters import random_head
from tests.mcore.toy_models import ToyHybridConfig, put_toys
from tests.oracle import HybridOracle


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes of a model; the remaining ranks are replicas."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


@contextmanager
def parallel(layout: Layout) -> Iterator[None]:
    """Initialize Megatron's parallel state for a layout, and split the tests' tiny models by it."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
    )
    initialize_rng_tracker(inference_rng_tracker=True)
    try:
        models: dict[RandomHybridConfig, Hybrid] = {}

        def hybrid(sizes: RandomHybridConfig) -> Hybrid:
            if sizes not in models:
                models[sizes] = _hybrid(sizes)
            return models[sizes]

        def block_bytes(sizes: RandomHybridConfig, block_size: int) -> int:
            return _bytes(hybrid(sizes).shape.block_bytes(block_size))

        def state_bytes(sizes: RandomHybridConfig, num_drafts: int = 0) -> int:
            return _state_bytes(hybrid(sizes).shape, num_drafts)

        with pytest.MonkeyPatch.context() as patch:
            for replacement in (hybrid, block_bytes, state_bytes):
                patch.setattr(engine_runs, replacement.__name__, replacement)
            random_head.cache_clear()
            yield
            random_head.cache_clear()
    except BaseException:  # its frames hold graphs, for whose end NCCL would wait: this process says what failed first
        parallel_state.destroy_model_parallel()
        raise
    gc.collect()  # NCCL waits for the end of graphs that hold its collectives
    parallel_state.destroy_model_parallel()
    _destroy_groups()


def _destroy_groups() -> None:
    """Destroy the process groups, which Megatron only drops, because each keeps threads alive."""
    for group in [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)


def _hybrid(sizes: RandomHybridConfig) -> Hybrid:
    model = build_model(sizes)
    oracle = HybridOracle.from_megatron(whole_model(sizes, model))
    return Hybrid(sizes, model, oracle, model_shape_of(model, ranks_of_process()))


def whole_model(sizes: RandomHybridConfig, model: Any) -> Any:
    """Return all weights of the model of which this rank has a shard, by the model's attributes."""
    whole = SimpleNamespace(config=model.config, position_embedding_type=model.position_embedding_type)
    whole.share_embeddings_and_output_weights = False
    for name, value in random_weights(sizes):
        _set(whole, name.split("."), value.to(torch.cuda.current_device()))
    whole.decoder.layers = [vars(whole.decoder.layers)[str(number)] for number in range(len(sizes.pattern))]
    whole.decoder.layer_type_list = list(sizes.pattern)
    for layer in (layer for layer, symbol in zip(whole.decoder.layers, sizes.pattern, strict=True) if symbol == "E"):
        layer.mlp.experts.local_experts = list(vars(layer.mlp.experts.local_experts).values())
        layer.mlp.router._rule = random_architecture(sizes).experts.rule
    if sizes.gated_delta is not None:
        for layer in (layer for layer in whole.decoder.layers if hasattr(layer, "mixer")):
            layer.mixer.recurrence = SimpleNamespace(name="gated_delta")
    if isinstance(sizes, ToyHybridConfig):
        for number, layer in enumerate(whole.decoder.layers):
            layer.layer_number = number + 1
        put_toys(whole, sizes)
    if model.position_embedding_type == "rope":
        whole.rotary_pos_emb = model.rotary_pos_emb
    return whole


def _set(index: SimpleNamespace, path: list[str], weight: Tensor) -> None:
    for step in path[:-1]:
        if not hasattr(index, step):
            setattr(index, step, SimpleNamespace())
        index = getattr(index, step)
    setattr(index, path[-1], weight)


def _state_bytes(shape: HybridModelShape, num_drafts: int) -> int:
    """Return the bytes of one fp32 state on this rank."""
    dtypes = StateDtypes(torch.float32, window=torch.float32, whole=torch.float32)
    groups = [StateGroup(own.layers, own.recurrence.tensors(dtypes)) for own in shape.recurrent]
    return _bytes(SlotLayout.of(groups, num_drafts).slot_bytes)


def _bytes(count: int) -> int:
    """Return at least one byte: settings need a positive budget even if nothing is needed."""
    return max(1, count)
