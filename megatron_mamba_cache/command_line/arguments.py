"""The flags and the checks of their values. Imports neither torch nor megatron, so that mistakes show at once."""

import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from .. import __version__
from ..config import FLAGS, SPLIT, CacheConfig, argument_of
from .card_settings import DRAFTER_SHARE
from .coordinator_access import add_coordinator_arguments
from .default_settings import DEFAULTS_IN_WORDS
from .flag_parser import FlagParser
from .flag_sources import variable_of
from .model_choice import MODEL_FLAGS, draft_directory
from .plan_arguments import add_plan_arguments
from .quiet import LEVELS
from .server_arguments import add_server_arguments
from .usage_error import UsageError

_INT32_MAX = 2**31 - 1

GREEDY: Mapping[str, float] = {"temperature": 1.0, "top_k": 1, "top_p": 0.0}
EDITING: Mapping[str, float] = {"temperature": 0.8, "top_k": 20, "top_p": 0.0}
"""For the built-in editing sessions: a small model that always takes the likeliest token soon repeats itself."""

_SAMPLING_IN_WORDS = (
    f"With no flag of temperature, top-k and top-p, the built-in editing sessions are sampled with temperature "
    f"{EDITING['temperature']} and top-k {EDITING['top_k']}, and everything else is greedy."
)

_PROCESSES_IN_WORDS = (
    "Started by torchrun, processes share a model, and those that are left hold others like it: sessions, and lines "
    "without one, are dealt out to these in turn. The first process prints and writes for all. Memory flags count for "
    "each process."
)

_REPLICAS_IN_WORDS = (
    "Started by torchrun, processes share a model, and those that are left are replicas behind a coordinator; the "
    "first process serves. Memory flags count for each process."
)

DRAFTERS = ("prompt-lookup", "draft-model")

_SOURCES_IN_WORDS = (
    f"Each flag may be set by an environment variable too, as --max-model-len by {variable_of('--max-model-len')}, or "
    "in the file of --config. The command line overrides the environment, which overrides the file."
)

_CHECKED_LATER: Mapping[str, object] = {"max_requests": 1}
"""Settings sized from the model: flags are checked against their real values once these are known."""


def command_parser() -> ArgumentParser:
    """Return the parser of the whole command line."""
    parser = FlagParser(
        prog="mamba-cache",
        description="Prefix caching for hybrid Mamba2 + attention models on megatron-core.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(_COMMANDS))
    for name, (text, description, add_arguments) in _COMMANDS.items():
        first_word = MODEL_FLAGS[0] if name == "serve" else None
        command = commands.add_parser(name, help=text, description=description, first_word=first_word)
        add_arguments(command)
        _add_common_arguments(command)
    return parser


def flag_of(name: str) -> str:
    """Return the flag that sets an argument or a field of `CacheConfig`."""
    return FLAGS[name][0] if name in FLAGS else "--" + name.replace("_", "-")


def name_flag(message: str) -> str:
    """Put the flag of a setting in front of a message that starts with the setting's name."""
    setting = message.split(" ", 1)[0]
    known = setting in FLAGS and flag_of(setting) not in message
    return f"{flag_of(setting)}: {message}" if known else message


def as_typed(message: str, words: Iterable[str]) -> str:
    """Return the message with the alias of each flag whose alias is among the words."""
    typed = {word.split("=", 1)[0] for word in words}
    for flag, *aliases in (*FLAGS.values(), MODEL_FLAGS):
        for alias in typed.intersection(aliases):
            message = re.sub(rf"(?<![\w-]){flag}(?![\w-])", alias, message)
    return message


def model_share(arguments: Namespace) -> float:
    """Return the model's share of one budget; a draft model has the rest."""
    return 1.0 if draft_directory(arguments) is None else 1 - DRAFTER_SHARE


def cache_config(arguments: Namespace, settings: Mapping[str, object]) -> CacheConfig:
    """Return the settings that the flags give, and `settings` for the rest; a draft model has its part of the budget.

    Raises:
        UsageError: Naming the flag.
    """
    try:
        config = CacheConfig.from_arguments(arguments, **settings)
    except ValueError as error:
        raise UsageError(name_flag(str(error))) from error
    given_gb = getattr(arguments, argument_of("cache_gb"))
    return config if given_gb is None else replace(config, cache_gb=model_share(arguments) * given_gb)


def with_sampling(arguments: Namespace, default: Mapping[str, float]) -> Namespace:
    """Return the arguments with the sampling flags of `default` if none was given, else with `GREEDY` for the rest."""
    given = {name: getattr(arguments, name) for name in GREEDY if getattr(arguments, name) is not None}
    return Namespace(**{**vars(arguments), **({**GREEDY, **given} if given else default)})


def check_generate_arguments(arguments: Namespace) -> None:
    """Raise `UsageError` for a value that can never work."""
    _check_range(arguments, "num_tokens_to_generate", 1, math.inf, "at least 1")
    _check_range(arguments, "temperature", 0, math.inf, "0 (greedy) or more, and finite")
    _check_range(arguments, "top_k", 0, _INT32_MAX, f"from 0 (off) to {_INT32_MAX}")
    _check_range(arguments, "top_p", 0, 1, "from 0 (off) to 1")
    _check_range(arguments, "seed", 0, _INT32_MAX, f"from 0 to {_INT32_MAX}")
    check_engine_arguments(arguments)


def check_engine_arguments(arguments: Namespace) -> None:
    """Raise `UsageError` for a cache or draft flag with a value that can never work."""
    cache_config(arguments, _CHECKED_LATER)
    _check_drafter(arguments)


def check_arguments_for_card(arguments: Namespace) -> None:
    """Do so where the one memory that other flags need may still be sized from a GPU."""
    is_sized = any(getattr(arguments, argument_of(name)) is not None for name in ("cache_gb", *SPLIT))
    cache_config(arguments, _CHECKED_LATER if is_sized else {**_CHECKED_LATER, "cache_gb": 1.0})
    _check_drafter(arguments)


def _check_drafter(arguments: Namespace) -> None:
    if not arguments.num_speculative_tokens:
        for flag, value in (("--drafter", arguments.drafter), ("--draft-hf-model", arguments.draft_hf_model)):
            if value is not None:
                raise UsageError(f"{flag} {value}: nothing is drafted; set --num-speculative-tokens to 1 or more")
    if arguments.drafter == "draft-model" and arguments.draft_hf_model is None:
        raise UsageError("--drafter draft-model: which model? name its directory with --draft-hf-model")
    if arguments.drafter != "draft-model" and arguments.draft_hf_model is not None:
        raise UsageError(f"--draft-hf-model {arguments.draft_hf_model}: only --drafter draft-model reads it")


def _check_range(arguments: Namespace, name: str, low: float, high: float, allowed: str) -> None:
    value = getattr(arguments, name)
    if not low <= value <= high or (isinstance(value, float) and math.isinf(value)):
        raise UsageError(f"{flag_of(name)} is {value}; it must be {allowed}")


def _add_generate_arguments(parser: ArgumentParser) -> None:
    _add_model_arguments(parser)
    prompts = parser.add_argument_group("prompts and results")
    prompts.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help='an object a line: {"prompt": str} or {"prompt_tokens": [int]}, optional "num_tokens_to_generate", '
        '"session" (lines of one session run one after another)',
    )
    prompts.add_argument("--output-path", metavar="FILE.json", help="write requests and a summary there")
    _add_sampling_arguments(parser.add_argument_group("sampling", _SAMPLING_IN_WORDS))
    _add_engine_arguments(parser, _PROCESSES_IN_WORDS)


def _add_serve_arguments(parser: ArgumentParser) -> None:
    _add_model_arguments(parser)
    add_server_arguments(parser)
    add_coordinator_arguments(parser)
    _add_engine_arguments(parser, _REPLICAS_IN_WORDS)


def _add_doctor_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(*MODEL_FLAGS, metavar="DIR", help="also say what this model needs; its weights are not read")


def _add_common_arguments(parser: FlagParser) -> None:
    group = parser.add_argument_group("settings", _SOURCES_IN_WORDS)
    level = "least severity of log messages; debug shows those of megatron-core and torch too (default: warning)"
    group.add_argument("--log-level", choices=LEVELS, default="warning", help=level)
    parser.add_config_argument(group)


def _add_model_arguments(parser: ArgumentParser) -> None:
    model = parser.add_argument_group("model").add_mutually_exclusive_group()
    model.add_argument(*MODEL_FLAGS, metavar="NAME_OR_DIR", help="Hugging Face directory, or a hub name: OWNER/NAME")
    model.add_argument(
        "--load",
        metavar="DIR",
        help="Megatron distributed checkpoint directory (torch_dist), written by this package or by Megatron-LM's "
        "training: of one iteration, or of the run, whose latest is taken",
    )
    model.add_argument("--random-model", action="store_true", help="a small model with random weights, built here")


def _add_engine_arguments(parser: ArgumentParser, processes_in_words: str) -> None:
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    machine.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        help="of the weights (default: on a GPU that of the checkpoint, on a CPU and for the built-in models fp32)",
    )
    _add_parallel_arguments(parser.add_argument_group("several processes", processes_in_words))
    cache = parser.add_argument_group("cache", DEFAULTS_IN_WORDS)
    CacheConfig.add_arguments(cache)  # type: ignore[arg-type]
    drafts = parser.add_argument_group("speculative decoding", "With --num-speculative-tokens above 0.")
    drafts.add_argument("--drafter", choices=DRAFTERS, help="what proposes tokens (default: prompt-lookup)")
    drafts.add_argument("--draft-hf-model", metavar="DIR", help="Hugging Face directory of the draft model")


def _add_parallel_arguments(group: object) -> None:
    add = group.add_argument  # type: ignore[attr-defined]
    for kind, shared in (("tensor", "layers"), ("pipeline", "depth"), ("expert", "experts")):
        flag, text = f"--{kind}-model-parallel-size", f"processes that share a model's {shared} (default: 1)"
        add(flag, type=int, default=1, metavar="N", help=text)


def _add_sampling_arguments(group: object) -> None:
    add = group.add_argument  # type: ignore[attr-defined]
    add("--num-tokens-to-generate", type=int, default=64, metavar="N", help="where a line says none (default: 64)")
    add("--temperature", type=float, metavar="T", help="default: 1.0; 0 is greedy")
    add("--top-k", type=int, metavar="K", help="default: 1, which is greedy; 0 is off")
    add("--top-p", type=float, metavar="P", help="default: 0, which is off")
    add("--seed", type=int, default=0, metavar="S", help="of the sampling (default: 0)")


_COMMANDS: Mapping[str, tuple[str, str, Callable[[FlagParser], None]]] = {
    "generate": (
        "generate text for prompts",
        "Generate text for prompts. Without --prompts: for built-in ones, then once more without the cache, to "
        "compare. Without a model: with the small one of Python source that ships.",
        _add_generate_arguments,
    ),
    "serve": (
        "serve OpenAI's API over HTTP",
        "Serve OpenAI's completions and chat completions over HTTP, with the prefix cache. The model may be the first "
        "word: mamba-cache serve NAME_OR_DIR. Without one: the small model of Python source that ships.",
        _add_serve_arguments,
    ),
    "doctor": (
        "print device, versions and the kernels in use",
        "Print device, versions and the kernels in use.",
        _add_doctor_arguments,
    ),
    "plan": (
        "print what caches of several sizes would save on a recorded load",
        "Replay a recorded load through the cache's policy, without a model and a GPU, and print the prompt tokens "
        "that a cache of each size would have skipped.",
        add_plan_arguments,
    ),
}
"""Each command: its line in the help, its description and what adds its flags."""
