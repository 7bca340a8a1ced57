"""Parse a command, run it, and end. torch and megatron are imported only once the flags are known to be good."""

import atexit
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress

from .arguments import as_typed, command_parser
from .commands import print_completion
from .flag_parser import FlagParser, flags_of, placed
from .flag_sources import SetFlag, UsageError, misspelled_variables
from .launch import Launch
from .quiet import quiet_libraries

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    It is 0, 1 for a failed comparison, a failed server or a package that cannot be used, or 2 for a usage error.

    Args:
        argv: The arguments after the program's name; None takes the process's.
    """
    if argv is not None:
        return _status_of(argv)
    end = QuickEnd()  # the arguments are the process's own, so it has nothing else to do
    status = _status_of(None)
    end.arm(status)
    return status


def _status_of(argv: Sequence[str] | None) -> int:
    parser, set_flags = command_parser(), tuple[SetFlag, ...]()
    try:
        arguments = parser.parse_args(argv)
        set_flags = arguments.set_flags
        _note_misspelled_variables(parser)
        return _run(arguments)
    except UsageError as error:
        if _speaks_for_all():
            words = [*(sys.argv[1:] if argv is None else argv), *(one.flag for one in set_flags)]
            message = as_typed(placed(" ".join(str(error).split()), set_flags), words)
            print(f"{parser.prog}: error: {message}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has closed it, as `head` does; buffered output must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


class QuickEnd:
    """Ends the process after all exit handlers, without the seconds that Python takes to tear down torch and megatron.

    Make it before torch is imported: exit handlers run in the reverse order of their registration. Until `arm` is
    called, the process ends like any other.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        atexit.register(self._end)

    def arm(self, status: int) -> None:
        """Let the process end with a status once its main thread is done."""
        self._status = status

    def _end(self) -> None:
        if self._status is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._status)


def _note_misspelled_variables(parser: FlagParser) -> None:
    if _speaks_for_all():
        for note in misspelled_variables(os.environ, flags_of(parser)):
            print(f"note: {note}", file=sys.stderr)


def _speaks_for_all() -> bool:
    """Return whether this is the first process of a launch; True if it cannot tell."""
    try:
        return Launch.of_environment().is_first
    except UsageError:
        return True


def _run(arguments: Namespace) -> int:
    if arguments.command == "completion":
        print_completion(command_parser(), arguments.shell)
        return 0
    with quiet_libraries():
        match arguments.command:
            case "generate":
                from .generate import generate as run
            case "serve":
                from .serve import serve as run
            case "chat":
                from .chat import chat as run
            case "plan":
                from .plan import print_plan as run
            case _:
                from .doctor import print_diagnosis as run
    return run(arguments)
