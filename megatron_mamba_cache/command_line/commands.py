"""Define the commands, their flags and shell completion, without importing torch or megatron."""

from argparse import Action, ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..config import CacheConfig
from .cache_flags import add_cache_arguments
from .chat_client import DEFAULT_URL
from .flag_parser import FlagParser
from .flag_sources import variable_of
from .model_choice import MODEL_FLAGS
from .quiet import LEVELS
from .server_arguments import add_coordinator_arguments, add_server_arguments
from .sizing import DEFAULTS_IN_WORDS

GREEDY: Mapping[str, float] = {"temperature": 1.0, "top_k": 1, "top_p": 0.0}
EDITING: Mapping[str, float] = {"temperature": 0.8, "top_k": 20, "top_p": 0.0}
"""Sampling settings for the built-in editing sessions; with greedy decoding, a small model repeats itself."""

SHELLS = ("bash", "zsh", "fish")
_COMPLETION_IN_WORDS = (
    "Print a script that completes commands, flags and paths in a shell. bash: source <(mamba-cache completion bash); "
    'zsh, after compinit: eval "$(mamba-cache completion zsh)"; fish: mamba-cache completion fish | source.'
)

_SAMPLING_IN_WORDS = (
    f"Without --temperature, --top-k and --top-p, the built-in editing sessions are sampled with temperature "
    f"{EDITING['temperature']} and top-k {EDITING['top_k']}; everything else is greedy."
)

_PROCESSES_IN_WORDS = (
    "Under torchrun, these flags set how many processes share one model; further processes run replicas of it. "
    "Sessions, and lines without a session, are assigned to replicas round-robin. Only the first process prints and "
    "writes. Memory flags apply to each process."
)

_REPLICAS_IN_WORDS = (
    "Under torchrun, these flags set how many processes share one model; further processes run replicas of it. A "
    "coordinator routes requests to the replicas. The first process serves HTTP. Memory flags apply to each process."
)

DRAFTERS = ("prompt-lookup", "draft-model", "mtp", "auto")
DEFAULT_GB = (10.0, 20.0, 40.0, 80.0)

_SOURCES_IN_WORDS = (
    f"Each flag can also be set by an environment variable, such as {variable_of('--max-model-len')} for "
    "--max-model-len, or in the --config file. The command line overrides the environment, which overrides the file."
)


def print_completion(parser: ArgumentParser, shell: str) -> None:
    """Print a script that enables completion of commands and flags in a shell, such as "bash"."""
    import shtab  # imported here because no other command needs it

    for action in _actions_of(parser):
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if "FILE" in metavar:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif "DIR" in metavar:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell))


def _actions_of(parser: ArgumentParser) -> Iterator[Action]:
    """Yield the argparse actions of a parser and of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action.choices, Mapping):
            for command in action.choices.values():
                yield from _actions_of(command)


def _add_generate_arguments(parser: ArgumentParser) -> None:
    _add_model_arguments(parser)
    prompts = parser.add_argument_group("prompts and results")
    prompts.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help='one JSON object per line: {"prompt": str} or {"prompt_tokens": [int]}, optionally with '
        '"num_tokens_to_generate" and "session" (the lines of a session run one after another)',
    )
    prompts.add_argument("--output-path", metavar="FILE.json", help="file for results and a summary")
    add = parser.add_argument_group("sampling", _SAMPLING_IN_WORDS).add_argument
    tokens = "tokens to generate for lines that do not set it (default: 64)"
    add("--num-tokens-to-generate", type=int, default=64, metavar="N", help=tokens)
    add("--temperature", type=float, metavar="T", help="sampling temperature; 0 is greedy (default: 1.0)")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens; 1 is greedy, 0 is off (default: 1)")
    top_p = "sample from the likeliest tokens with a total probability of P; 0 is off (default: 0)"
    add("--top-p", type=float, metavar="P", help=top_p)
    add("--seed", type=int, default=0, metavar="S", help="seed for sampling (default: 0)")
    _add_engine_arguments(parser, _PROCESSES_IN_WORDS)


def _add_serve_arguments(parser: ArgumentParser) -> None:
    _add_model_arguments(parser)
    add_server_arguments(parser)
    add_coordinator_arguments(parser)
    _add_engine_arguments(parser, _REPLICAS_IN_WORDS, drafter="auto")


def _add_chat_arguments(parser: ArgumentParser) -> None:
    _add_directory_arguments(parser)
    _add_machine_arguments(parser)
    add = parser.add_argument_group("chat").add_argument
    add("--url", help=f"the server's URL (default: {DEFAULT_URL}, or a new server if a flag names a model)")
    add("--api-key", metavar="KEY", help="the server's API key (default: none)")
    add("--system", metavar="TEXT", help="instructions before the conversation")
    add("--max-tokens", type=int, metavar="N", help="maximum tokens per reply (default: 512)", default=512)
    add("--temperature", type=float, metavar="T", help="sampling temperature (default: the server's)")
    add("--seed", type=int, metavar="S", help="seed for sampling (default: random)")
    add("--say", action="append", metavar="TEXT", help="text of a turn, used instead of typed input; may be repeated")


def _add_plan_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--trace", required=True, metavar="FILE", help="recorded load, .jsonl or .jsonl.gz")
    in_words = "Give either a model or both numbers of bytes, each summed over all ranks."
    add = parser.add_argument_group("model", in_words).add_argument
    add("--model", "--hf-model", metavar="DIR", help="Hugging Face directory; only its config.json is read")
    add("--kv-bytes-per-token", type=int, metavar="N", help="bytes per token, over all attention layers")
    add("--state-bytes", type=int, metavar="N", help="bytes of one cached state, over all recurrent layers")
    add = parser.add_argument_group("cache").add_argument
    live = "dtype of recurrent states, with --model (default: fp32)"
    add("--ssm-state-dtype", choices=CacheConfig.RULES["ssm_state_dtype"], default="fp32", help=live)
    stored = "format of cached states, with --model: like live states, or quantized to 8 bits (default: live)"
    add("--cached-state-dtype", choices=CacheConfig.RULES["cached_state_dtype"], default="live", help=stored)
    keys = "format of cached keys and values, with --model: the dtype of the weights, or FP8 (default: auto)"
    add("--kv-cache-dtype", choices=CacheConfig.RULES["kv_cache_dtype"], default="auto", help=keys)
    routes = "count the memory for the routed experts of each token, with --model"
    add("--record-routes", action="store_true", help=routes)
    sizes = ", ".join(f"{size:g}" for size in DEFAULT_GB)
    add("--cache-gb", type=float, nargs="+", metavar="G", help=f"cache sizes in GiB (default: {sizes})")
    host = "sizes of the host tier in GiB, each combined with each --cache-gb; 0 is no host tier (default: 0)"
    add("--host-cache-gb", type=float, nargs="+", metavar="G", help=host)
    block = CacheConfig().block_size_tokens
    add("--block-size", type=int, default=block, metavar="N", help="tokens per KV block (default: 256)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_common_arguments(parser: FlagParser) -> None:
    """Add the flags that all commands have in common to a parser."""
    group = parser.add_argument_group("settings", _SOURCES_IN_WORDS)
    level = "lowest level of log messages; debug includes those of megatron-core and torch (default: warning)"
    group.add_argument("--log-level", choices=LEVELS, default="warning", help=level)
    parser.add_config_argument(group)


def _add_model_arguments(parser: ArgumentParser) -> None:
    model = _add_directory_arguments(parser)
    model.add_argument("--random-model", action="store_true", help="build a small model with random weights")


def _add_directory_arguments(parser: ArgumentParser) -> Any:
    model = parser.add_argument_group("model").add_mutually_exclusive_group()
    model.add_argument(*MODEL_FLAGS, metavar="NAME_OR_DIR", help="Hugging Face directory or hub name (OWNER/NAME)")
    model.add_argument(
        "--load",
        metavar="DIR",
        help="directory of a Megatron distributed checkpoint (torch_dist), written by this package or by Megatron-LM; "
        "for the directory of a training run, its latest iteration is loaded",
    )
    return model


def _add_engine_arguments(parser: ArgumentParser, processes_in_words: str, drafter: str | None = None) -> None:
    _add_machine_arguments(parser)
    processes = parser.add_argument_group("several processes", processes_in_words)
    for kind, shared in (("tensor", "each layer"), ("pipeline", "the layers"), ("expert", "the experts")):
        flag, text = f"--{kind}-model-parallel-size", f"number of processes that split {shared} (default: 1)"
        processes.add_argument(flag, type=int, default=1, metavar="N", help=text)
    cache = parser.add_argument_group("cache", DEFAULTS_IN_WORDS)
    add_cache_arguments(cache)  # type: ignore[arg-type]
    needed = "These flags need --num-speculative-tokens above 0; with auto and an MTP head, its default is 5."
    drafts = parser.add_argument_group("speculative decoding", needed)
    method = "method that generates drafts; auto: the MTP head, if the model has one, or prompt lookup"
    default = f" (default: {drafter or DRAFTERS[0]})"
    drafts.add_argument("--drafter", choices=DRAFTERS, default=drafter, help=method + default)
    drafts.add_argument("--draft-hf-model", metavar="DIR", help="Hugging Face directory of the draft model")


def _add_machine_arguments(parser: ArgumentParser) -> None:
    machine = parser.add_argument_group("machine")
    device = "device to run on (default: auto, a GPU if there is one)"
    machine.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device)
    dtype = "precision of the weights (default: the checkpoint's on a GPU; fp32 on a CPU and for built-in models)"
    machine.add_argument("--dtype", choices=("fp32", "bf16"), help=dtype)
    dequantized = "dequantize FP8 and FP4 weights while they load; they then take as much memory as others"
    machine.add_argument("--dequantize-weights", action="store_true", help=dequantized)
    inputs = "inputs of FP8 layers for prompt tokens: quantized if the checkpoint says so, or bf16 (default: auto)"
    machine.add_argument("--activation-dtype", choices=("auto", "bf16"), default="auto", help=inputs)


COMMANDS: Mapping[str, tuple[str, str, Callable[[FlagParser], object]]] = {
    "generate": (
        "generate text for prompts",
        "Generate text for prompts. Without --prompts, run built-in ones with and without the cache, and compare. "
        "The default model is the small model of Python source that ships with the package.",
        _add_generate_arguments,
    ),
    "serve": (
        "serve OpenAI's API over HTTP",
        "Serve OpenAI's and Anthropic's APIs over HTTP, with the prefix cache. The model may be the first argument: "
        "mamba-cache serve NAME_OR_DIR. The default is the small model of Python source that ships with the package.",
        _add_serve_arguments,
    ),
    "chat": (
        "chat in the terminal with a server",
        "Chat in the terminal with a server that has OpenAI's API. Each turn shows its cached prompt tokens and the "
        "time to its first token. With a model and no --url, the command starts a server and stops it after the chat.",
        _add_chat_arguments,
    ),
    "completion": (
        "print a script that completes commands, flags and paths in a shell",
        _COMPLETION_IN_WORDS,
        lambda parser: parser.add_argument("shell", choices=SHELLS, help="shell to print the script for"),
    ),
    "doctor": (
        "print device, versions and the kernels in use",
        "Print device, versions and the kernels in use.",
        lambda parser: parser.add_argument(
            *MODEL_FLAGS, metavar="DIR", help="also show what this model needs; reads no weights"
        ),
    ),
    "plan": (
        "estimate how much prefill caches of several sizes would save on a recorded load",
        "Replay a recorded load through the cache's policy, without a model or a GPU, and print how many prompt tokens "
        "would not have needed prefill with each cache size.",
        _add_plan_arguments,
    ),
}
"""Command → its help line, its description, and the function that adds its flags."""
