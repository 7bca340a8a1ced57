"""Parse and check command-line flags without importing torch or megatron."""

import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from .. import __version__
from ..config import CacheConfig
from ..errors import HostBudgetError
from ..tiers.host_budget import available_bytes
from .cache_flags import FLAGS, argument_of, config_of, given_budget
from .commands import COMMANDS, GREEDY, add_common_arguments
from .flag_parser import FlagParser
from .flag_sources import UsageError
from .model_choice import MODEL_FLAGS, draft_directory
from .sizing import DRAFTER_SHARE


def select_device(name: str) -> str:
    """Return the device to run on, "cpu" or "cuda"; "auto" selects CUDA if it is available.

    Raises:
        UsageError: If "cuda" is given but there is no device, or "cpu" in a process that has initialized CUDA.
    """
    if name == "cpu":
        loaded = sys.modules.get("torch")
        if loaded is not None and loaded.cuda.is_initialized():  # CUDA cannot be shut down within a process
            raise UsageError("--device cpu cannot be used in a process that has initialized CUDA; start a new process")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise UsageError("--device cuda needs a CUDA device, but torch finds none; use --device cpu or auto")
    return "cpu"


def check_tiers(arguments: Namespace) -> None:
    """Raise `UsageError` if --host-cache-gb exceeds this machine's free memory or --disk-cache-dir is not writable.

    The engine checks the host budget again after the weights are loaded, when the size of a cached state is known.
    """
    host_gb = getattr(arguments, argument_of("host_cache_gb"))
    if host_gb is not None and host_gb * 2**30 > available_bytes():
        raise UsageError(str(HostBudgetError(host_gb, available_bytes())))
    directory = getattr(arguments, argument_of("disk_cache_dir"))
    if directory is not None and not _can_be_written(Path(directory)):
        raise UsageError(f"--disk-cache-dir {directory} cannot be created or written to; give another directory")


def _can_be_written(directory: Path) -> bool:
    """Return True if the directory, or its nearest existing parent, is writable."""
    path = directory.absolute()
    try:
        existing = next(found for found in (path, *path.parents) if os.path.lexists(found))
    except (OSError, ValueError):
        return False
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


_INT32_MAX = 2**31 - 1
_AUTO_DRAFTS = 5
"""Maximum number of drafts per request and step of `--drafter auto` with an MTP head, unless a flag sets it."""

_CHECKED_LATER: Mapping[str, object] = {"max_requests": 1}
"""Placeholder values for settings that can be checked only when the model is known."""


def command_parser() -> FlagParser:
    """Return the parser for the whole command line."""
    parser = FlagParser(
        prog="mamba-cache",
        description="Prefix caching for hybrid models of recurrent and attention layers on megatron-core.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for name, (text, description, add_arguments) in COMMANDS.items():
        first_word = MODEL_FLAGS[0] if name == "serve" else None
        command = commands.add_parser(name, help=text, description=description, first_word=first_word)
        add_arguments(command)
        add_common_arguments(command)
    return parser


def flag_of(name: str) -> str:
    """Return the flag that sets a `CacheConfig` field or another parsed argument, such as "--seed" for "seed"."""
    return FLAGS[name][0] if name in FLAGS else "--" + name.replace("_", "-")


def name_flag(message: str) -> str:
    """If a message starts with the name of a setting, prefix it with the flag for that setting."""
    setting = message.split(" ", 1)[0]
    known = setting in FLAGS and flag_of(setting) not in message
    return f"{flag_of(setting)}: {message}" if known else message


def as_typed(message: str, words: Iterable[str]) -> str:
    """Replace each flag in an error message with its alias, if the alias is among the `words` that the user typed."""
    typed = {word.split("=", 1)[0] for word in words}
    for flag, *aliases in (*FLAGS.values(), MODEL_FLAGS):
        for alias in typed.intersection(aliases):
            message = re.sub(rf"(?<![\w-])(--[\w-]+/)*{flag}(/--[\w-]+)*(?![\w-])", alias, message)
    return message


def model_share(arguments: Namespace) -> float:
    """Return the fraction of the cache budget for the main model: 1, or less if there is a draft model."""
    return 1.0 if draft_directory(arguments) is None else 1 - DRAFTER_SHARE


def cache_config(arguments: Namespace, settings: Mapping[str, object]) -> CacheConfig:
    """Build the cache config from flags, with `settings` as defaults; raise `UsageError` that names an invalid flag."""
    try:
        config = config_of(arguments, **settings)
    except ValueError as error:
        raise UsageError(name_flag(str(error))) from error
    given_gb = given_budget(arguments)
    return config if given_gb is None else replace(config, cache_gb=model_share(arguments) * given_gb)


def with_sampling(arguments: Namespace, default: Mapping[str, float]) -> Namespace:
    """Return a copy of the arguments in which every sampling flag has a value.

    If no sampling flag is given, all values come from `default`; otherwise the missing ones come from `GREEDY`.
    """
    given = {name: getattr(arguments, name) for name in GREEDY if getattr(arguments, name) is not None}
    return Namespace(**{**vars(arguments), **({**GREEDY, **given} if given else default)})


def with_auto_drafts(arguments: Namespace, *, has_head: bool) -> Namespace:
    """Return a copy of the arguments in which `--drafter auto` has a number of drafts: 0 without an MTP head."""
    if arguments.drafter != "auto" or arguments.num_speculative_tokens is not None:
        return arguments
    return Namespace(**{**vars(arguments), "num_speculative_tokens": _AUTO_DRAFTS if has_head else 0})


def check_generate_arguments(arguments: Namespace) -> None:
    """Raise `UsageError` if a flag of the generate command has an invalid value."""
    _check_range(arguments, "num_tokens_to_generate", 1, math.inf, "at least 1")
    _check_range(arguments, "temperature", 0, math.inf, "0 (greedy) or more, and finite")
    _check_range(arguments, "top_k", 0, _INT32_MAX, f"from 0 (off) to {_INT32_MAX}")
    _check_range(arguments, "top_p", 0, 1, "from 0 (off) to 1")
    _check_range(arguments, "seed", 0, _INT32_MAX, f"from 0 to {_INT32_MAX}")
    check_engine_arguments(arguments)


def check_engine_arguments(arguments: Namespace) -> None:
    """Raise `UsageError` if a cache or draft flag has a value that is invalid for every model."""
    cache_config(arguments, _CHECKED_LATER)
    if not arguments.num_speculative_tokens:
        for flag, value in (("--drafter", arguments.drafter), ("--draft-hf-model", arguments.draft_hf_model)):
            if value not in (None, "auto"):
                raise UsageError(
                    f"{flag} {value} needs speculative decoding; set --num-speculative-tokens to 1 or more"
                )
    if arguments.drafter == "draft-model" and arguments.draft_hf_model is None:
        raise UsageError("--drafter draft-model needs a draft model; give its directory with --draft-hf-model")
    if arguments.drafter != "draft-model" and arguments.draft_hf_model is not None:
        raise UsageError(f"--draft-hf-model {arguments.draft_hf_model} needs --drafter draft-model; add that flag")


def _check_range(arguments: Namespace, name: str, low: float, high: float, allowed: str) -> None:
    value = getattr(arguments, name)
    if not low <= value <= high or (isinstance(value, float) and math.isinf(value)):
        raise UsageError(f"{flag_of(name)} is {value}; it must be {allowed}")
