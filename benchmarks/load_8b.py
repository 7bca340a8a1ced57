"""Measure the time and memory to load an 8B model or an MoE model, and check that it reuses prefixes.

    PYTHONPATH=. python3 benchmarks/load_8b.py [--shape 8b|experts|tiny] [--fp8] [--json]

The script writes a NemotronH checkpoint with random weights to a temporary folder, in bf16 or in FP8 with blocks of 128
x 128. It loads the checkpoint in bf16, onto the GPU if there is one, and serves requests that share a long prefix. The
files were just written, so they are read from the page cache. The shape "experts" is the first quarter of the layers of
a model with the size of Nemotron 3 Nano.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from loads.model_sizes import MODEL_FIELDS
from loads.random_checkpoint import write_checkpoint
from measuring.machine import describe_machine

from megatron_mamba_cache import CacheConfig, build_engine
from megatron_mamba_cache.build import TokenIdTokenizer
from megatron_mamba_cache.command_line.prompts import PromptLine
from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries
from megatron_mamba_cache.command_line.request_runner import RequestRunner, SamplingFlags
from megatron_mamba_cache.command_line.results import RunResult
from megatron_mamba_cache.models.checkpoints.hugging_face import LoadedModel, load_hugging_face

GIB = 2**30
NUM_REQUESTS = 8
NUM_GENERATED = 32
GREEDY = SamplingFlags(NUM_GENERATED, temperature=1.0, top_k=1, top_p=0.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and the requests that it serves.

    Args:
        fields: Configuration fields of the model.
        shared, own: Numbers of prompt tokens that all requests share, and that each request has alone.
        state_gb, kv_gb: GiB for cached states and for KV blocks.
    """

    fields: dict[str, Any]
    max_shard_bytes: int
    block_size: int
    shared: int
    own: int
    state_gb: float
    kv_gb: float


_8B = Shape(
    fields=MODEL_FIELDS["8b"] | {"max_position_embeddings": 8192},
    max_shard_bytes=4 * 10**9,
    block_size=256,
    shared=2048,
    own=64,
    state_gb=4.0,
    kv_gb=2.0,
)
_OF_EXPERTS = {"hybrid_override_pattern": "MEMEM*EMEMEM", "max_position_embeddings": 8192}
SHAPES = {
    "8b": _8B,
    "experts": replace(_8B, fields=MODEL_FIELDS["nano3"] | _OF_EXPERTS),
    "tiny": Shape(
        fields=MODEL_FIELDS["tiny"] | {"max_position_embeddings": 1024},
        max_shard_bytes=100_000,
        block_size=64,
        shared=128,
        own=16,
        state_gb=0.01,
        kv_gb=0.01,
    ),
}


def main() -> None:
    """Measure, then print the results as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="default: %(default)s")
    parser.add_argument("--fp8", action="store_true", help="write projections in FP8")
    parser.add_argument("--folder", type=Path, help="parent of the temporary folder; default: that of the system")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    with quiet_libraries(), own_warnings_hidden():
        figures = measure(SHAPES[arguments.shape], arguments.folder, arguments.fp8)
    print(json.dumps({"machine": describe_machine(), **figures}, indent=2) if arguments.json else table(figures))


def measure(shape: Shape, folder: Path | None, is_fp8: bool) -> dict[str, Any]:
    """Write, load and serve a model; return all results by name."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        directory = Path(temporary)
        with stopwatch() as writing:
            weight_bytes = write_checkpoint(directory, shape.fields, shape.max_shard_bytes, device, is_fp8)
        sizes = [file.stat().st_size for file in directory.glob("*.safetensors")]
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        host = HostMemory()
        with stopwatch() as loading:
            loaded = load_hugging_face(directory, torch.bfloat16)
        host_growth = host.peak_growth()
    figures = {
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "weights in bf16, GiB": weight_bytes / GIB,
        "files": len(sizes),
        "largest file, GiB": max(sizes) / GIB,
        "writing them, s": writing[0],
        "loading, s": loading[0],
        "loading, GB/s": weight_bytes / loading[0] / 1e9,
        "peak growth of host memory while loading, GiB (mapped files included)": host_growth / GIB,
        "peak GPU memory while loading, GiB": peak_gpu_bytes() / GIB,
        "the same, of the weights": peak_gpu_bytes() / weight_bytes,
    }
    return figures | generation_figures(shape, loaded)


def generation_figures(shape: Shape, loaded: LoadedModel) -> dict[str, Any]:
    """Serve the requests with and without the cache, and return the results by name."""
    uncached = serve(shape, loaded, prompts(shape), prefix_caching=False)
    cached = serve(shape, loaded, prompts(shape), prefix_caching=True)
    errors = [record.error for record in (*uncached.records, *cached.records) if record.error is not None]
    if errors:
        raise RuntimeError(f"requests failed: {errors}")
    return {
        "requests": len(cached.records),
        "prompt tokens": cached.prompt_tokens,
        "prompt tokens skipped": cached.cached_tokens,
        "generated tokens": cached.generated_tokens,
        "generating, s": cached.seconds,
        "generating without the cache, s": uncached.seconds,
        "mean time to first token, s": cached.mean_time_to_first_token_s,
        "mean time to first token without the cache, s": uncached.mean_time_to_first_token_s,
        "distinct generated tokens": len({token for record in cached.records for token in record.generated_tokens}),
        "peak GPU memory, GiB": peak_gpu_bytes() / GIB,
    }


def prompts(shape: Shape) -> list[PromptLine]:
    """Return requests whose prompts share a prefix."""
    generator, vocab_size = torch.Generator().manual_seed(0), shape.fields["vocab_size"]

    def some_tokens(count: int) -> list[int]:
        return torch.randint(vocab_size, (count,), generator=generator).tolist()

    shared = some_tokens(shape.shared)
    return [PromptLine(request, (*shared, *some_tokens(shape.own))) for request in range(NUM_REQUESTS)]


def serve(shape: Shape, loaded: LoadedModel, lines: list[PromptLine], prefix_caching: bool) -> RunResult:
    """Run requests on a new engine whose kernels are compiled before the first request."""
    config = CacheConfig(
        block_size_tokens=shape.block_size,
        buffer_size_gb=shape.kv_gb,
        prefix_caching=prefix_caching,
        prefix_caching_mamba_gb=shape.state_gb,
        max_requests=NUM_REQUESTS,
        max_tokens=shape.shared + shape.own,
        max_sequence_length=shape.fields["max_position_embeddings"],
    )
    engine = build_engine(loaded.model, config)
    engine.warmup()
    return RequestRunner(engine, TokenIdTokenizer(shape.fields["vocab_size"]), GREEDY, lambda _: None).run(lines)


class HostMemory:
    """Growth of the resident memory of this process in bytes; 0 on systems other than Linux."""

    def __init__(self) -> None:
        with suppress(OSError):  # without the reset, the peak is that of the whole process, which is at least as large
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = _status_bytes("VmRSS")

    def peak_growth(self) -> int:
        """Return the largest growth so far in bytes."""
        return _status_bytes("VmHWM") - self._before


def _status_bytes(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def peak_gpu_bytes() -> int:
    """Return the peak bytes of GPU tensors; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


@contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Context manager that yields a list and, at the end, appends the seconds of its body, including GPU work."""
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds.append(time.perf_counter() - start)


def table(figures: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    rows = [(name, f"{value:.4g}" if isinstance(value, float) else f"{value:,}") for name, value in figures.items()]
    return "\n".join(["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


if __name__ == "__main__":
    main()
