"""The flags of the command `plan`."""

from argparse import ArgumentParser

from ..config import CACHED_STATE_DTYPES, CacheConfig

DEFAULT_GB = (10.0, 20.0, 40.0, 80.0)


def add_plan_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `plan`."""
    parser.add_argument("--trace", required=True, metavar="FILE", help="recorded load, .jsonl or .jsonl.gz")
    model = parser.add_argument_group("model", "Either a model, or the two sizes; all ranks together.")
    model.add_argument(
        "--model", "--hf-model", metavar="DIR", help="Hugging Face directory; only its configuration is read"
    )
    model.add_argument("--kv-bytes-per-token", type=int, metavar="N", help="keys and values of all attention layers")
    model.add_argument("--state-bytes", type=int, metavar="N", help="a state of all recurrent layers")
    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--cached-state-dtype",
        choices=CACHED_STATE_DTYPES,
        default="live",
        help="with --model: cached states in float32, as live ones, or quantized to 8 bits (default: live)",
    )
    sizes = ", ".join(f"{size:g}" for size in DEFAULT_GB)
    cache.add_argument("--cache-gb", type=float, nargs="+", metavar="G", help=f"GiB of the cache (default: {sizes})")
    cache.add_argument(
        "--host-cache-gb",
        type=float,
        nargs="+",
        metavar="G",
        help="GiB of the host's memory below it, each with each --cache-gb; 0: none (default: 0)",
    )
    cache.add_argument(
        "--block-size", type=int, default=CacheConfig().block_size_tokens, metavar="N", help="tokens (default: 256)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
