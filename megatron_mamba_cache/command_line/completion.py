"""The completion command: a script that completes commands and flags in a shell."""

from argparse import ArgumentParser

SHELLS = ("bash", "zsh", "fish")


def print_completion(parser: ArgumentParser, shell: str) -> None:
    """Print the script of a shell for a whole command line."""
    import shtab  # not needed by any other command

    print(shtab.complete(parser, shell))
