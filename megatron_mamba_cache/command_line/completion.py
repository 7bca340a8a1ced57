"""The completion command: a script that completes commands, flags and paths in a shell."""

from argparse import Action, ArgumentParser
from collections.abc import Iterator, Mapping

SHELLS = ("bash", "zsh", "fish")
IN_WORDS = (
    "Print a script that completes commands, flags and paths in a shell. bash: source <(mamba-cache completion bash); "
    'zsh, after compinit: eval "$(mamba-cache completion zsh)"; fish: mamba-cache completion fish | source.'
)


def print_completion(parser: ArgumentParser, shell: str) -> None:
    """Print the script of a shell for a whole command line."""
    import shtab  # not needed by any other command

    for action in _actions_of(parser):
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        if "FILE" in metavar:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif "DIR" in metavar:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell))


def _actions_of(parser: ArgumentParser) -> Iterator[Action]:
    """Yield the actions of a parser and of the commands below it."""
    for action in parser._actions:
        yield action
        if isinstance(action.choices, Mapping):
            for command in action.choices.values():
                yield from _actions_of(command)
