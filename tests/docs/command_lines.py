"""Command lines of this package in shell text, parsed by the parser that the command itself uses."""

import re
import shlex
from argparse import Namespace

from megatron_mamba_cache.command_line.arguments import check_engine_arguments, check_generate_arguments, command_parser
from megatron_mamba_cache.command_line.server_arguments import check_server_arguments

_IMAGE = "mamba-cache-server"  # of deploy/Dockerfile; its entry point is the command
_ENDS = {"|", "||", "&", "&&", ";", ">", ">>", "<"}


def arguments_in(text: str) -> list[list[str]]:
    """Return the arguments of each command line of this package in a shell block."""
    found = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        words = _words(line)
        for index, word in enumerate(words):
            after = words[index + 1 :]
            is_module = word == "megatron_mamba_cache" and words[index - 1] == "-m"
            if word == "mamba-cache" or is_module or (word == _IMAGE and words[:2] == ["docker", "run"]):
                found.append(_until_end(after))
            elif word == "examples/generate.py":
                found.append(["generate", *_until_end(after)])
    return [arguments for arguments in found if arguments]


def parsed(arguments: list[str]) -> Namespace:
    """Parse one command line as the command does, up to where it would look for files and devices."""
    namespace = command_parser().parse_args(arguments)
    if namespace.command == "serve":
        check_engine_arguments(namespace)
        check_server_arguments(namespace)
    elif namespace.command == "generate":
        check_generate_arguments(_with_sampling(namespace))
    return namespace


def _with_sampling(namespace: Namespace) -> Namespace:
    greedy = {"temperature": 1.0, "top_k": 1, "top_p": 0.0}
    values = vars(namespace)
    return Namespace(**{**values, **{name: value for name, value in greedy.items() if values[name] is None}})


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # a quoted text of several lines, which is no command of this package
        return []


def _until_end(words: list[str]) -> list[str]:
    end = next((index for index, word in enumerate(words) if word in _ENDS), len(words))
    return words[:end]
