"""Entry point: parse the flags, then import torch and megatron and run the command."""

import atexit
import gc
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing, suppress

from ..installation import MissingExtraError, require_extra
from .arguments import (
    as_typed,
    check_engine_arguments,
    check_generate_arguments,
    check_tiers,
    command_parser,
    select_device,
    with_sampling,
)
from .built_in_prompts import built_in_lines, editing_lines
from .commands import EDITING, GREEDY, print_completion
from .flag_parser import flags_of, placed
from .flag_sources import SetFlag, UsageError, misspelled_variables
from .launch import Launch
from .model_choice import chosen_directory, require_token_ids
from .prompts import read_prompts
from .quiet import hide_stacks_of_signals, quiet_libraries
from .results import check_writable
from .server_arguments import api_keys_of, check_server_arguments, routing_settings


def serve(arguments: Namespace) -> int:
    """Run the serve command until a signal ends it, and return the exit status; raise `UsageError` for a bad flag."""
    try:
        require_extra("server", "serve")
    except MissingExtraError as error:
        raise UsageError(str(error)) from error
    launch = Launch.of_environment()
    launch.num_replicas(arguments)
    check_engine_arguments(arguments)
    check_tiers(arguments)
    check_server_arguments(arguments)
    keys = api_keys_of(arguments)
    routing = routing_settings(arguments, launch)
    directory = chosen_directory(arguments)
    listener = bound_socket(arguments.host, arguments.port) if launch.is_first else None
    with quiet_libraries(arguments.log_level):
        device = select_device(arguments.device)
        # These imports load torch, so the device must be selected before them.
        hide_stacks_of_signals()
        from .processes import joined_processes
        from .serving import Serving

        with joined_processes(launch, arguments, device) as replicas:
            serving = replicas.make(lambda: Serving(arguments, keys, directory, device))
            gc.freeze()  # exclude modules and weights from later garbage collection
            with closing(replicas.make(serving.engine)) as engine:
                if launch.num_processes == 1 and listener is not None:
                    return serving.run(engine, listener)
                return serving.run_replica(engine, listener, routing)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to a port but not yet listening; raise `UsageError` if binding fails."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UsageError(
            f"cannot listen on --host {host} --port {port}: {error.strerror or error}; choose another host or port"
        ) from error
    return listener


def generate(arguments: Namespace) -> int:
    """Run the generate command and return the exit status; raise `UsageError` for an invalid flag, file or line."""
    launch = Launch.of_environment()
    launch.num_replicas(arguments)
    directory = chosen_directory(arguments)
    has_file = arguments.prompts is not None
    edits = directory is not None and not has_file
    arguments = with_sampling(arguments, EDITING if edits else GREEDY)
    check_generate_arguments(arguments)
    check_tiers(arguments)
    lines = read_prompts(arguments.prompts) if has_file else editing_lines() if edits else built_in_lines()
    if directory is not None:
        directory.check_prompts(lines, arguments.prompts)
    if arguments.output_path is not None and launch.is_first:
        check_writable(arguments.output_path)
    if launch.is_first and arguments.top_k == 1 and (arguments.temperature != 1 or arguments.top_p):
        print("note: --top-k 1 is greedy, so --temperature and --top-p change nothing; try --top-k 0", file=sys.stderr)
    with quiet_libraries(arguments.log_level):
        device = select_device(arguments.device)
        # These imports load torch, so the device must be selected before them.
        hide_stacks_of_signals()
        from .generation import Generation
        from .processes import joined_processes

        with joined_processes(launch, arguments, device) as replicas:
            generation = replicas.make(lambda: Generation(arguments, directory, device, replicas))
            if directory is not None and not generation.reads_text:  # a hub model, downloaded after the first check
                require_token_ids(lines, arguments.prompts, directory.path)
            return generation.run(lines) if has_file else generation.run_and_compare(lines)


EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the command, and return the exit status.

    The status is 0 for success, 1 for a failed comparison, a failed server or an unusable package, and 2 for a usage
    error. If `argv` is None, the arguments of the process are used.
    """
    if argv is not None:
        return _status_of(argv)
    end = QuickEnd()  # this is the process's entry point, so nothing runs afterwards
    status = _status_of(None)
    end.arm(status)
    return status


def _status_of(argv: Sequence[str] | None) -> int:
    parser, set_flags = command_parser(), tuple[SetFlag, ...]()
    try:
        arguments = parser.parse_args(argv)
        set_flags = arguments.set_flags
        if _speaks_for_all():
            for note in misspelled_variables(os.environ, flags_of(parser)):
                print(f"note: {note}", file=sys.stderr)
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
        # The reader of stdout, such as `head`, has closed the pipe. Flushing at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


class QuickEnd:
    """Exit handler that ends the process without the slow teardown of torch, if `arm` has been called.

    Create it before torch is imported. Exit handlers run in reverse order of registration, so it then runs last.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        atexit.register(self._end)

    def arm(self, status: int) -> None:
        """Make the process exit with `status` when its main thread ends, without the teardown of torch."""
        self._status = status

    def _end(self) -> None:
        if self._status is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._status)


def _speaks_for_all() -> bool:
    """Return True if this process is the first of a launch, or if the launch variables are invalid."""
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
                run = generate
            case "serve":
                run = serve
            case "chat":
                from .chat import chat as run
            case "plan":
                from .plan import print_plan as run
            case _:
                from .doctor import print_diagnosis as run
    return run(arguments)
