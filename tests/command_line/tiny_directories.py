"""Model directories as transformers' save_pretrained writes them: tiny, random, with or without a tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BambaConfig,
    GraniteMoeHybridConfig,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig

from megatron_mamba_cache.command_line.built_in_prompts import editing_lines

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 512

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2, "mamba_chunk_size": 24}

_DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def _nemotron_h() -> PreTrainedConfig:
    return NemotronHConfig(
        **_COMMON,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
        time_step_min=1e-9,  # transformers clamps there when it reads a prompt, and only then
    )


def _bamba() -> PreTrainedConfig:
    return BambaConfig(**_COMMON, **_MAMBA, num_hidden_layers=3, attn_layer_indices=[1])


def _granite() -> PreTrainedConfig:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    shape = {"num_hidden_layers": 3, "layer_types": kinds, "shared_intermediate_size": 48, "num_local_experts": 4}
    return GraniteMoeHybridConfig(**_COMMON, **_MAMBA, **shape)


def _qwen3_next() -> PreTrainedConfig:
    return Qwen3NextConfig(**_COMMON, **_DELTA, **_EXPERTS)


def _qwen3_5() -> PreTrainedConfig:
    return Qwen3_5TextConfig(**_COMMON, **_DELTA)


def _qwen3_5_moe_with_vision() -> PreTrainedConfig:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_position_embeddings": 16}
    vision |= {"out_hidden_size": _COMMON["hidden_size"], "patch_size": 4}
    return Qwen3_5MoeConfig(text_config={**_COMMON, **_DELTA, **_EXPERTS}, vision_config=vision)


FAMILIES = {
    "nemotron_h": _nemotron_h,
    "bamba": _bamba,
    "granite": _granite,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe with vision": _qwen3_5_moe_with_vision,
}


def save_model(family: str, directory: Path, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """Write a random model of a family and return it; its weights are large enough that tokens differ."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config.get_text_config().vocab_size = vocabulary
    is_whole = config.get_text_config() is not config
    model = (AutoModelForImageTextToText if is_whole else AutoModelForCausalLM).from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    model.save_pretrained(directory)
    return model


def save_tokenizer(directory: Path, vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Write a byte-level BPE tokenizer with `vocabulary` ids, the end of a text among them, and return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([str(editing_lines()[0].prompt)], trainer)
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
    saved.save_pretrained(directory)
    return saved
