"""Parse flags from the command line, environment variables and a YAML file."""

import json
import os
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import configargparse
from typing_extensions import override

from .flag_sources import PREFIX, SetFlag, SettableFlags, UsageError, Value, first_name, unknown_flag, variable_of

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


class FlagParser(configargparse.ArgumentParser):  # type: ignore[misc]
    """Argument parser in which the command line overrides environment variables, which override the --config file.

    Errors are raised as `UsageError` with a one-line message. In the parsed namespace, `set_flags` has the flags that
    variables or the file set and the command line did not override.

    Args:
        first_word: Flag whose value may be the first argument, without the flag's name; None if there is no such flag.
    """

    def __init__(self, *args: Any, first_word: str | None = None, **settings: Any) -> None:
        super().__init__(
            *args,
            allow_abbrev=False,
            auto_env_var_prefix=PREFIX,
            add_env_var_help=False,
            add_config_file_help=False,
            config_file_parser_class=_FileReader,
            config_file_open_func=lambda path: partial(self._read_file, Path(path)),
            **settings,
        )
        self._first_word = first_word
        self._of_file: dict[str, SetFlag] = {}
        self._of_environment: dict[str, SetFlag] = {}

    def add_config_argument(self, group: Any) -> None:
        """Add --config to a group; it also enables flags from environment variables."""
        group.add_argument(
            "--config",
            metavar="FILE.yaml",
            is_config_file_arg=True,
            env_var=variable_of("--config"),
            help="file with one flag per line, such as max-model-len: 8192",
        )

    @property
    def settable(self) -> SettableFlags:
        """The flags of this parser that a file or an environment variable may set."""
        return SettableFlags(self._actions)

    @override
    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None, **_: Any
    ) -> tuple[Namespace, list[str]]:
        """Parse flags as `ArgumentParser` does, but raise `UsageError` that names the invalid flag and its source."""
        words = list(args) if args is not None else None
        if self._first_word is not None and words and not words[0].startswith("-"):
            words[:1] = [self._first_word, words[0]]
        if not any(action.dest == "config" for action in self._actions):
            return super().parse_known_args(words, namespace, env_vars={})
        if sum(word.split("=", 1)[0] == "--config" for word in words or ()) > 1:
            raise UsageError("--config is given more than once; merge the files into one")
        self._of_file, self._of_environment = {}, self.settable.of_environment(os.environ)
        values = {variable_of(name): one.value for name, one in self._of_environment.items()}
        variables = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        config = variable_of("--config")
        variables |= {config: os.environ[config]} if os.environ.get(config) else {}
        parsed, unknown = super().parse_known_args(words, namespace, env_vars=variables)
        if unknown:
            self._refuse(unknown)
        parsed.set_flags = self._in_effect()
        return parsed, unknown

    @override
    def error(self, message: str) -> NoReturn:
        raise UsageError(placed(message.removeprefix("argument "), self._in_effect()))

    def _read_file(self, path: Path) -> dict[str, Value]:
        """Return the values of the flags that a file sets, keyed by long name."""
        self._of_file = self.settable.of_file(path)
        return {name: one.value for name, one in self._of_file.items()}

    def _in_effect(self) -> tuple[SetFlag, ...]:
        """Return the flags whose values in the last parse came from an environment variable or the file."""
        found = []
        for source, settings in self.get_source_to_settings_dict().items():
            if source == "environment_variables":
                by_name = self._of_environment
            elif source.startswith("config_file"):
                by_name = self._of_file
            else:
                continue
            names = (first_name(action) for action, _ in settings.values())
            found += [by_name[name] for name in names if name in by_name]
        return tuple(found)

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        flag = next((word.split("=", 1)[0] for word in unknown if word.startswith("--") and word != "--"), None)
        if flag is None:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        self.error(unknown_flag(flag, flags_of(self) - {"--help"}, self.prog))


class _FileReader(configargparse.ConfigFileParser):  # type: ignore[misc]
    """Adapter that gives configargparse the flags that `FlagParser` has read from the --config file."""

    @override
    def parse(self, stream: Callable[[], dict[str, Value]]) -> OrderedDict[str, Value]:
        return OrderedDict(stream())


def flags_of(parser: Any) -> set[str]:
    """Return the long flags, such as "--seed", of a parser and its subcommands."""
    flags: set[str] = set()
    for action in parser._actions:
        flags.update(option for option in action.option_strings if option.startswith("--"))
        if isinstance(action.choices, Mapping):
            flags.update(*map(flags_of, action.choices.values()))
    return flags


def placed(message: str, set_flags: Iterable[SetFlag]) -> str:
    """Prefix an error message with the sources of those `set_flags` that it names before its first semicolon."""
    named = set(_FLAG.findall(message.split(";", 1)[0]))
    sources = [one.source for one in set_flags if named.intersection(one.names) and one.source not in message]
    return f"{' and '.join(sources)}: {message}" if sources else message
