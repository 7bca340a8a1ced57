"""Assumptions of this package about megatron-core: the signature of every method that it overrides or calls.

Another version of megatron-core fails here first, by name.
"""

import ast
import inspect
from collections.abc import Iterator
from importlib.metadata import version

import pytest
from megatron.core.inference.contexts.dynamic_block_allocator import BlockAllocator
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord
from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import (
    AbstractModelInferenceWrapper,
)
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_mamba_cache.mcore import SUPPORTED_MEGATRON_CORE
from megatron_mamba_cache.mcore.context import MambaCacheContext
from megatron_mamba_cache.mcore.controller import MambaCacheController
from megatron_mamba_cache.mcore.engine import MambaCacheEngine
from megatron_mamba_cache.mcore.expert_layer import ExpertLayer
from megatron_mamba_cache.mcore.kv_block_allocator import KVBlockAllocator
from megatron_mamba_cache.mcore.local_spec import LocalHybridStack
from megatron_mamba_cache.mcore.megatron_settings import SET_BY_MEGATRON
from megatron_mamba_cache.mcore.mixers.gated_delta import GatedDeltaMixer
from megatron_mamba_cache.mcore.mixers.mamba2 import CachingMambaMixer
from megatron_mamba_cache.mcore.self_attention import CachingSelfAttention
from megatron_mamba_cache.mcore.served_model import HybridInferenceWrapper
from megatron_mamba_cache.mcore.suspendable_engine import SuspendableEngine
from megatron_mamba_cache.replicas.coordinator import PrefixCoordinator
from megatron_mamba_cache.replicas.engine import ReplicaEngine

OUR_CLASSES = (
    HybridInferenceWrapper,
    ExpertLayer,
    MambaCacheContext,
    MambaCacheController,
    SuspendableEngine,
    MambaCacheEngine,
    ReplicaEngine,
    PrefixCoordinator,
    KVBlockAllocator,
    CachingMambaMixer,
    GatedDeltaMixer,
    CachingSelfAttention,
    LocalHybridStack,
)

PINNED: dict[type, dict[str, str]] = {
    BlockAllocator: {
        "__init__": "(self, context, total_count, paused_count)",
        "allocate_memory_blocks": "(self, num_blocks)",
        "get_active_used": "(self)",
        "get_paused_used": "(self)",
        "is_memory_available": "(self, num_blocks)",
        "release_memory_blocks": "(self, blocks)",
        "reset": "(self)",
    },
    DynamicInferenceContext: {
        "__init__": "(self, *, params_dtype, num_layers, kv_channels, num_attention_heads, max_sequence_length, "
        "buffer_size_gb, paused_buffer_size_gb=None, max_requests=None, max_tokens=16384, block_size_tokens=256, "
        "tensor_model_parallel_size=None, pipeline_model_parallel_size=None, pg_collection=None, "
        "cache_mla_latent=False, kv_lora_rank=None, qk_pos_emb_head_dim=None, num_cuda_graphs=None, "
        "materialize_only_last_token_logits=True, mamba_inference_state_config=None, "
        "use_cuda_graphs_for_non_decode_steps=True, use_flashinfer_fused_rope=False, unified_memory_level=0, "
        "cuda_graph_max_tokens=None, cuda_graph_mixed_prefill_count=16, metrics_writer=None, "
        "request_metadata_types=None, persist_cuda_graphs=False, offload_kv_cache=False)",
        "add_request": "(self, req, chunk_length=None)",
        "allocate_all_tensors": "(self, *, is_init)",
        "append_key_value_cache": "(self, layer_number, key, value)",
        "apply_rotary_emb_query": "(self, query, query_emb, config, cu_seqlens_q, cp_group, mscale=1.0)",
        "calculate_log_probs": "(self, logits, new_tokens, only_last_token_logits=False)",
        "check_availability": "(self, req)",
        "cu_kv_lengths": "(self)",
        "cu_query_lengths": "(self)",
        "current_input_and_position_ids": "(self, *, num_warmup_tokens=None)",
        "deallocate_all_tensors": "(self)",
        "has_unfinished_requests": "(self)",
        "initialize_attention_state": "(self, *, construct_graph_dimensions=None)",
        "get_kvcache_utilization_stats": "(self)",
        "is_decode_only": "(self)",
        "is_static_batching": "(self)",
        "key_value_cache": "(self, layer_number)",
        "last_token_logits": "(self, logits)",
        "mamba_states_cache": "(self, layer_number)",
        "reset": "(self)",
        "update_requests": "(self, active_requests_mask, new_tokens)",
        "using_cuda_graph_this_step": "(self)",
    },
    TextGenerationController: {
        "_dynamic_step_context_init": "(self, construct_graph_dimensions=None, is_dummy_forward=False)",
        "_dynamic_step_forward_logits": "(self, input_ids, position_ids)",
        "dummy_forward": "(self)",
        "_init_dynamic_sampling_tensors": "(self)",
        "async_generate_output_tokens_dynamic_batch": "async (self, skip_bookkeeping=False)",
        "set_stop_word_finished_ids_callback": "(self, callback)",
    },
    AbstractModelInferenceWrapper: {
        "_forward": "(self, inference_input)",
        "run_one_forward_step": "(self, inference_input, recv_buffer_seq_len=None)",
    },
    GPTInferenceWrapper: {
        "__init__": "(self, model, inference_wrapper_config, inference_context=None, pg_collection=None)",
    },
    TransformerLayer: {"forward": "(self, *args, **kwargs)"},
    DynamicInferenceEngine: {
        "__init__": "(self, controller, context, enable_cuda_graph=None, random_seed=None, *, "
        "track_paused_request_events=False, enable_chunked_prefill=True, inference_logging_step_interval=0, "
        "pg_collection=None)",
        "_add_request": "(self, request)",
        "async_bookkeep": "async (self, step_result, context_state, step_time, step_count)",
        "_check_stop_words_for_request_post_append": "(self, request)",
        "_ep_group_has_work": "async (self, local_work)",
        "_notify_cond_for_new_request": "async (self)",
        "_run_coroutine_sync": "(self, coro)",
        "add_request": "(self, request_id, prompt, sampling_params=None)",
        "async_forward": "async (self)",
        "async_step": "async (self)",
        "create_cuda_graphs": "(self, reset_context=True)",
        "get_request": "(self, request_id)",
        "has_unfinished_requests": "(self)",
        "post_process_requests": "(self, request_ids, finished_request_ids, evict_request_ids, step_time, sample, "
        "log_probs, top_n_logprobs=None)",
        "reset": "(self)",
        "resume": "(self)",
        "run_engine_with_coordinator": "async (self, *, loop=None)",
        "schedule_requests": "(self)",
        "schedule_waiting_requests": "(self)",
        "start_listening_to_data_parallel_coordinator": "async (self, inference_coordinator_port=None, "
        "launch_inference_coordinator=True, *, loop=None)",
        "run_engine": "async (self, *, loop=None)",
        "suspend": "(self)",
    },
    DataParallelInferenceCoordinator: {
        "__init__": "(self, pipe_connection, data_parallel_size, tokenizer, inference_coordinator_port=None)",
        "detokenize": "(self, finished_request_record)",
        "start": "(self)",
        "stop": "(self)",
    },
    DynamicInferenceRequest: {
        "add_event_add": "(self)",
        "add_event_error_nontransient": "(self, error)",
        "add_event_evict": "(self)",
    },
    DynamicInferenceRequestRecord: {"checkpoint": "(self, tokenizer=None)"},
    MambaMixer: {
        "__init__": "(self, config, submodules, d_model, d_conv=4, conv_init=None, expand=2, A_init_range=(1, 16), "
        "D_has_hdim=False, rmsnorm=True, norm_before_gate=False, dt_min=0.001, dt_max=0.1, dt_init='random', "
        "dt_scale=1.0, dt_init_floor=0.0001, bias=False, conv_bias=True, chunk_size=128, layer_number=None, "
        "use_mem_eff_path=None, d_state=None, headdim=None, ngroups=None, pg_collection=None, pp_layer_offset=0)",
        "_dynamic_inference": "(self, hidden_states, context)",
        "forward": "(self, hidden_states, inference_context=None, *, inference_params=None, packed_seq_params=None)",
        "sharded_state_dict": "(self, prefix='', sharded_offsets=(), metadata=None)",
    },
    MegatronModule: {
        "__init__": "(self, config)",
        "sharded_state_dict": "(self, prefix='', sharded_offsets=(), metadata=None)",
    },
    Attention: {
        "_adjust_key_value_for_inference": "(self, inference_context, query, key, value, rotary_pos_emb, "
        "rotary_pos_cos=None, rotary_pos_sin=None, rotary_pos_cos_sin=None, sequence_len_offset=None, *, "
        "inference_params=None)",
        "forward": "(self, hidden_states, attention_mask, key_value_states=None, inference_context=None, "
        "rotary_pos_emb=None, rotary_pos_cos=None, rotary_pos_sin=None, rotary_pos_cos_sin=None, "
        "attention_bias=None, packed_seq_params=None, sequence_len_offset=None, *, inference_params=None)",
    },
    SelfAttention: {
        "__init__": "(self, config, submodules, layer_number, attn_mask_type=<AttnMaskType.padding: 1>, "
        "cp_comm_type=None, pg_collection=None)",
        "get_query_key_value_tensors": "(self, hidden_states, key_value_states=None, output_gate=False, "
        "split_qkv=True)",
    },
    MambaStack: {
        "__init__": "(self, config, submodules, residual_in_fp32=False, pre_process=True, "
        "hybrid_attention_ratio=0.0, hybrid_mlp_ratio=0.0, hybrid_override_pattern=None, post_layer_norm=True, "
        "post_process=True, device=None, dtype=None, pg_collection=None)",
        "forward": "(self, hidden_states, attention_mask, inference_context=None, rotary_pos_emb=None, *, "
        "inference_params=None, packed_seq_params=None, padding_mask=None)",
    },
}
PINS = [(cls, name) for cls, methods in PINNED.items() for name in methods]


def shape_of(method: object) -> str:
    """Return a method's parameters and defaults, without annotations, and True if it is a coroutine."""
    assert callable(method)
    signature = inspect.signature(method)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return f"async {text}" if inspect.iscoroutinefunction(inspect.unwrap(method)) else text


def overridden_methods(cls: type) -> Iterator[tuple[type, str]]:
    """Yield each method of `cls` that megatron-core also defines, with the class that defines it."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("megatron_mamba_cache.")]
    theirs = [base for base in cls.__mro__ if base.__module__.startswith("megatron.")]
    for name in sorted({name for base in ours for name in vars(base)}):
        origin = next((base for base in theirs if inspect.isfunction(vars(base).get(name))), None)
        if origin is not None:
            yield origin, name


def test_installed_megatron_core_is_the_supported_release() -> None:
    assert version("megatron-core") == SUPPORTED_MEGATRON_CORE == "0.16.1"


@pytest.mark.parametrize(("cls", "name"), PINS, ids=[f"{cls.__name__}.{name}" for cls, name in PINS])
def test_megatron_method_has_the_expected_signature(cls: type, name: str) -> None:
    assert name in vars(cls), f"{cls.__name__} no longer defines {name}"
    assert shape_of(vars(cls)[name]) == PINNED[cls][name]


@pytest.mark.parametrize("cls", OUR_CLASSES)
def test_every_overridden_megatron_method_has_a_recorded_signature(cls: type) -> None:
    overridden = list(overridden_methods(cls))
    assert overridden
    assert [(origin.__name__, name) for origin, name in overridden if name not in PINNED.get(origin, {})] == []


@pytest.mark.parametrize("cls", [cls for cls in OUR_CLASSES if cls is not CachingSelfAttention])
def test_override_takes_every_positional_argument_of_megatron(cls: type) -> None:
    for origin, name in overridden_methods(cls):
        if name == "__init__":
            continue
        theirs = inspect.signature(getattr(origin, name)).parameters.values()
        ours = inspect.signature(getattr(cls, name))
        arguments = [parameter for parameter in theirs if parameter.kind is not parameter.KEYWORD_ONLY]
        ours.bind(*arguments, **{p.name: None for p in theirs if p.kind is p.KEYWORD_ONLY})


@pytest.mark.parametrize("ours", OUR_CLASSES, ids=lambda ours: ours.__name__)
def test_override_decorator_marks_exactly_the_overriding_methods(ours: type) -> None:
    theirs = {name for base in ours.__mro__ if base.__module__.startswith("megatron.core") for name in vars(base)}
    methods = {name: method for name, method in vars(ours).items() if inspect.isfunction(method) and name[:2] != "__"}
    marked = {name for name, method in methods.items() if getattr(method, "__override__", False)}
    assert marked == methods.keys() & theirs


def test_megatrons_engine_sets_only_known_attributes_of_the_context() -> None:
    source = ast.parse(inspect.getsource(inspect.getmodule(DynamicInferenceEngine)))  # type: ignore[arg-type]
    stores = (node for node in ast.walk(source) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    assert {node.attr for node in stores if ast.unparse(node.value) in ("context", "self.context")} == SET_BY_MEGATRON
