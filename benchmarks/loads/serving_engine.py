"""Engines for the serving benchmarks, by model dimensions and caching mode."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from loads.model_sizes import MODEL_FIELDS
from loads.random_checkpoint import complete, random_model
from loads.random_codes import QUANTIZED_FAMILIES, WEIGHTS, Weights
from megatron.core.inference.sampling_params import SamplingParams

from megatron_mamba_cache import CacheConfig, build_engine


@dataclass(frozen=True, slots=True)
class ServedShape:
    """A model with random weights, and the limits of the engines that serve it.

    Args:
        fields: Configuration fields of the model.
        max_length: Maximum number of tokens of a request, prompt and reply together.
        state_gb, kv_gb: GiB for cached states (in addition to one live state per request), and for KV blocks.
        cache_gb: GiB of one memory budget that KV blocks and states share; None: separate memory.
        host_cache_gb: GiB of host memory for the host tier; None: no host tier.
        num_graphs: Number of batch sizes whose decode steps run as CUDA graphs on a GPU.
        prefill_graph_tokens: Maximum number of prompt tokens of a CUDA graph; None: the engine's default.
        prompt_tokens_with_decode: Maximum number of prompt tokens in a step with decoding requests; None: no limit.
        draft_states: How decode steps keep the states of drafts: as a window of states, or replayed from a ring.
        adaptive_drafts: If True, a step verifies only drafts that are likely to save time.
        weights: Format of the weights; quantized ones are those of published files (`loads/random_codes.py`).
        activation_dtype: "auto" quantizes the activations of prompt tokens, if the weights are in FP8.
        record_routes: If True, routed experts are recorded.
    """

    fields: dict[str, Any]
    block_size: int
    max_length: int
    max_requests: int
    max_tokens: int
    state_gb: float
    kv_gb: float
    num_graphs: int = 9
    prefill_graph_tokens: int | None = None
    prompt_tokens_with_decode: int | None = None
    cache_gb: float | None = None
    host_cache_gb: float | None = None
    draft_states: Literal["auto", "replay", "window"] = "auto"
    adaptive_drafts: bool = True
    weights: Weights = "bf16"
    activation_dtype: Literal["auto", "bf16"] = "auto"
    record_routes: bool = False

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids are smaller."""
        return int(self.fields["vocab_size"])


SHAPES = {
    "8b": ServedShape(MODEL_FIELDS["8b"], 256, 65_536, 64, 8192, state_gb=24.0, kv_gb=24.0),
    "nano3": ServedShape(MODEL_FIELDS["nano3"], 256, 65_536, 64, 8192, state_gb=16.0, kv_gb=8.0),
    "super": ServedShape(MODEL_FIELDS["super"], 256, 65_536, 64, 8192, state_gb=16.0, kv_gb=8.0),
    "granite-small": ServedShape(MODEL_FIELDS["granite-small"], 256, 65_536, 64, 8192, state_gb=16.0, kv_gb=8.0),
    "granite-tiny": ServedShape(MODEL_FIELDS["granite-tiny"], 256, 65_536, 64, 8192, state_gb=16.0, kv_gb=8.0),
    "bamba": ServedShape(MODEL_FIELDS["bamba"], 256, 65_536, 64, 8192, state_gb=24.0, kv_gb=16.0),
    "qwen36-27b": ServedShape(MODEL_FIELDS["qwen36-27b"], 256, 65_536, 64, 8192, state_gb=24.0, kv_gb=16.0),
    "qwen36-35b": ServedShape(MODEL_FIELDS["qwen36-35b"], 256, 65_536, 64, 8192, state_gb=16.0, kv_gb=8.0),
    "qwen3-next": ServedShape(MODEL_FIELDS["qwen3-next"], 256, 65_536, 64, 8192, state_gb=16.0, kv_gb=8.0),
    "small": ServedShape(MODEL_FIELDS["small"], 256, 32_768, 32, 8192, state_gb=1.0, kv_gb=2.0),
    "tiny": ServedShape(MODEL_FIELDS["tiny"], 64, 4096, 16, 1024, state_gb=0.01, kv_gb=0.02),
}
QWEN_SHAPES = ("qwen36-27b", "qwen36-35b", "qwen3-next")
LARGE_SHAPES = ("8b", "nano3", "super", "granite-small", "granite-tiny", "bamba", *QWEN_SHAPES)
"""Shapes that need a GPU."""


@dataclass(frozen=True, slots=True)
class Mode:
    """Caching settings of an engine."""

    prefix_caching: bool
    decode_checkpoints: Literal["rolling", "all", "none"] = "none"


MODES = {
    "no cache": Mode(prefix_caching=False),
    "prompt boundaries": Mode(prefix_caching=True),
    "full": Mode(prefix_caching=True, decode_checkpoints="rolling"),
}
"""Caching modes: nothing; prompt boundaries only, as on Megatron's development branch; and replies too."""


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line flags that `shape_of` reads."""
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="model to measure; default: %(default)s")
    parser.add_argument("--state-gb", type=float, metavar="G", help="GiB of cached states")
    parser.add_argument("--kv-gb", type=float, metavar="G", help="GiB of KV blocks")
    parser.add_argument("--cache-gb", type=float, metavar="G", help="GiB of one budget for KV blocks and states")
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens of a KV block")
    parser.add_argument("--record-routes", action="store_true", default=None, help="record routed experts")
    parser.add_argument("--num-graphs", type=int, metavar="N", help="number of batch sizes with CUDA graphs; 0: none")


def add_weights_arguments(parser: argparse.ArgumentParser, nargs: Literal["+"] | None = None) -> None:
    """Add the flags of the format of weights that `shape_of` reads.

    Args:
        nargs: "+" for a benchmark that compares several formats; the shape has the first one.
    """
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        nargs=nargs,
        default=[WEIGHTS[0]] if nargs else WEIGHTS[0],
        help="format of the weights" + (", each compared with the first one" if nargs else ""),
    )
    parser.add_argument(
        "--activation-dtype", choices=("auto", "bf16"), default="auto", help="inputs of FP8 weights in prompts"
    )


def shape_of(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, limits: Mapping[str, Mapping[str, Any]]
) -> ServedShape:
    """Return the shape that the flags select; exit with an error if this machine cannot serve it.

    Args:
        limits: Fields that a benchmark overrides unless a flag sets them, by name of the shape.
    """
    if arguments.shape in LARGE_SHAPES and not torch.cuda.is_available():
        parser.error(f"--shape {arguments.shape} needs a CUDA device; on a CPU take --shape tiny")
    given = {
        name: value
        for name in ("state_gb", "kv_gb", "cache_gb", "block_size", "num_graphs", "activation_dtype", "record_routes")
        if (value := vars(arguments).get(name)) is not None
    }
    weights = vars(arguments).get("weights", WEIGHTS[0])
    formats = [weights] if isinstance(weights, str) else weights
    shape = replace(SHAPES[arguments.shape], weights=formats[0], **{**limits.get(arguments.shape, {}), **given})
    if set(formats) != {"bf16"} and complete(shape.fields)["model_type"] not in QUANTIZED_FAMILIES:
        parser.error(f"--shape {arguments.shape} has only --weights bf16")
    return shape


def model_of(shape: ServedShape) -> Any:
    """Build the model in bf16 on a GPU, and in fp32 on a CPU, where bf16 is slow."""
    fields = shape.fields | {"max_position_embeddings": shape.max_length}
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return random_model(fields, dtype, shape.weights, quantizes_activations=shape.activation_dtype == "auto")


def config_of(shape: ServedShape, mode: Mode, num_drafts: int = 0) -> CacheConfig:
    """Return the settings of an engine.

    Without a cache, the only limit of a prefill chunk is the step's maximum number of tokens.
    """
    prefill_graphs = {"cuda_graph_prefill_tokens": shape.prefill_graph_tokens}
    split = {"buffer_size_gb": shape.kv_gb, "prefix_caching_mamba_gb": shape.state_gb}
    return CacheConfig(
        block_size_tokens=shape.block_size,
        **(split if shape.cache_gb is None else {"cache_gb": shape.cache_gb}),
        host_cache_gb=shape.host_cache_gb,
        prefix_caching=mode.prefix_caching,
        decode_checkpoints=mode.decode_checkpoints,
        num_speculative_tokens=num_drafts,
        draft_states=shape.draft_states,
        adaptive_drafts=shape.adaptive_drafts,
        record_routes=shape.record_routes,
        align_prefill_chunks=mode.prefix_caching,
        max_requests=shape.max_requests,
        max_tokens=shape.max_tokens,
        max_sequence_length=shape.max_length,
        max_prompt_tokens_beside_decode=shape.prompt_tokens_with_decode,
        num_cuda_graphs=shape.num_graphs if torch.cuda.is_available() else 0,
        **(prefill_graphs if shape.prefill_graph_tokens is not None else {}),
    )


@contextmanager
def serving_engine(
    model: Any, shape: ServedShape, mode: Mode, num_drafts: int = 0, drafter: Any = None
) -> Iterator[Any]:
    """Context manager that yields an engine after warmup and frees its memory at the end.

    By default, drafts are proposed by prompt lookup. All serving benchmarks build their engines here.
    """
    engine = build_engine(model, config_of(shape, mode, num_drafts), drafter=drafter)
    try:
        engine.warmup()
        yield engine
    finally:
        engine.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def send(engine: Any, request_id: int, prompt: Sequence[int], num_tokens: int) -> None:
    """Add a greedy request that generates exactly `num_tokens` tokens."""
    greedy = SamplingParams(num_tokens_to_generate=num_tokens, top_k=1, termination_id=-1)
    engine.add_request(request_id, list(prompt), greedy)
