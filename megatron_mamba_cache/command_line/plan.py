"""The plan command: replay a recorded workload to estimate how much prefill each cache size would save."""

import json
from argparse import Namespace
from pathlib import Path

from ..config import CacheConfig
from ..planning.caches import CacheSizes
from ..planning.plan import ReplayedLoad, plan
from ..planning.recorded_load import read_load
from .commands import DEFAULT_GB
from .flag_sources import UsageError
from .model_choice import described_shape
from .quiet import quiet_libraries


def print_plan(arguments: Namespace) -> int:
    """Replay the recorded workload, print one line per cache size, and return 0; raise `UsageError` for bad input."""
    _check(arguments)
    budgets, host_budgets = arguments.cache_gb or DEFAULT_GB, arguments.host_cache_gb or (0.0,)
    sizes = _sizes(arguments)
    try:
        load = read_load(Path(arguments.trace))
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--trace {arguments.trace}: {error}") from error
    try:
        result = plan(load, sizes, budgets, host_budgets)
    except ValueError as error:
        raise UsageError(f"--block-size {arguments.block_size}: {error}") from error
    rows = [
        {
            "cache_gb": cache.cache_gb,
            "host_cache_gb": cache.host_cache_gb,
            "prompt_tokens": cache.replayed.prompt_tokens,
            "skipped_tokens": cache.replayed.skipped_tokens,
            "share": cache.replayed.share,
            "unlimited_share": result.unlimited.share,
        }
        for cache in result.caches
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(
        f"{len(load.requests):,} requests; {sizes.kv_bytes_per_token:,} bytes of KV a token, "
        f"{sizes.state_bytes:,} bytes a state, blocks of {sizes.block_size} tokens"
    )
    has_host = arguments.host_cache_gb is not None
    host = f"  {'host, GiB':>10}" if has_host else ""
    print(f"{'cache, GiB':>10}{host}  {'prompt tokens':>15}  {'skipped':>15}  {'share':>6}")
    for cache in result.caches:
        host = f"  {cache.host_cache_gb:>10g}" if has_host else ""
        print(f"{cache.cache_gb:>10g}{host}{_figures(cache.replayed)}")
    print(f"{'unlimited':>10}{' ' * len(host)}{_figures(result.unlimited)}")
    return 0


def _figures(replayed: ReplayedLoad) -> str:
    return f"  {replayed.prompt_tokens:>15,}  {replayed.skipped_tokens:>15,}  {replayed.share:>6.3f}"


def _check(arguments: Namespace) -> None:
    """Raise `UsageError` if a flag has an invalid value."""
    if arguments.block_size < 1:
        raise UsageError(f"--block-size is {arguments.block_size}; it must be at least 1")
    for size in arguments.cache_gb or ():
        if not 0 < size < 2**20:
            raise UsageError(f"--cache-gb is {size}; it must be more than 0 and below {2**20}")
    for size in arguments.host_cache_gb or ():
        if not 0 <= size < 2**20:
            raise UsageError(f"--host-cache-gb is {size}; it must be at least 0 and below {2**20}")


def _sizes(arguments: Namespace) -> CacheSizes:
    """Return the bytes of KV blocks and states, computed for the model or given by flags."""
    given = {"--kv-bytes-per-token": arguments.kv_bytes_per_token, "--state-bytes": arguments.state_bytes}
    missing = [flag for flag, value in given.items() if value is None]
    if arguments.model is not None:
        if len(missing) < len(given):
            raise UsageError(f"--model cannot be combined with {' or '.join(given)}; give the model or the bytes")
        formats = CacheConfig(
            cached_state_dtype=arguments.cached_state_dtype,
            kv_cache_dtype=arguments.kv_cache_dtype,
            ssm_state_dtype=arguments.ssm_state_dtype,
            record_routes=arguments.record_routes,
        ).resolved()
        return _sizes_of(Path(arguments.model), arguments.block_size, formats, arguments.log_level)
    if arguments.cached_state_dtype != "live":
        raise UsageError(
            "--cached-state-dtype needs --model; without it, give the bytes of a cached state as --state-bytes"
        )
    if arguments.ssm_state_dtype != "fp32":
        raise UsageError("--ssm-state-dtype needs --model; without it, give the bytes of a state as --state-bytes")
    if arguments.kv_cache_dtype != "auto":
        raise UsageError("--kv-cache-dtype needs --model; without it, give the bytes as --kv-bytes-per-token")
    if arguments.record_routes:
        raise UsageError("--record-routes needs --model; without it, count the experts in --kv-bytes-per-token")
    if missing:
        raise UsageError(f"{missing[0]} is missing; give --model DIR, or both {' and '.join(given)}")
    for flag, value in given.items():
        if not 1 <= value < 2**40:
            raise UsageError(f"{flag} is {value}; it must be a number of bytes between 1 and {2**40 - 1}")
    return CacheSizes(arguments.kv_bytes_per_token, arguments.state_bytes, arguments.block_size)


def _sizes_of(directory: Path, block_size: int, formats: CacheConfig, log_level: str) -> CacheSizes:
    """Return the bytes of a model's KV blocks and states, stored in the formats of `formats`."""
    try:
        with quiet_libraries(log_level):
            _, shape = described_shape(directory)
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {directory}: {error}") from error
    kv_bytes = shape.block_bytes(1, formats.kv_cache_dtype) + shape.route_bytes(formats)
    return CacheSizes(kv_bytes, shape.cached_layout(formats).slot_bytes, block_size)
