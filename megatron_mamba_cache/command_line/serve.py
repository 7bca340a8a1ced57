"""The serve command up to the import of torch: check the flags, take the port, choose the device."""

import gc
import socket
from argparse import Namespace
from contextlib import closing

from ..installation import MissingExtraError, require_extra
from .arguments import check_engine_arguments, check_tiers, select_device
from .flag_sources import UsageError
from .launch import Launch
from .model_choice import chosen_directory
from .quiet import hide_stacks_of_signals, quiet_libraries
from .server_arguments import api_keys_of, check_server_arguments, routing_settings


def serve(arguments: Namespace) -> int:
    """Serve until a signal ends it; return the exit status.

    Raises:
        UsageError: On a bad flag, model, device or port, or if a package is missing.
    """
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
        # These import torch, which fixes the device.
        hide_stacks_of_signals()
        from .processes import joined_processes
        from .serving import Serving

        with joined_processes(launch, arguments, device) as replicas:
            serving = replicas.make(lambda: Serving(arguments, keys, directory, device))
            gc.freeze()  # modules and weights stay; no later collection, the one in `close` included, has to scan them
            with closing(replicas.make(serving.engine)) as engine:
                if launch.num_processes == 1 and listener is not None:
                    return serving.run(engine, listener)
                return serving.run_replica(engine, listener, routing)


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind a port without listening yet.

    Raises:
        UsageError: If it cannot be bound.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UsageError(f"--host {host} --port {port}: {error.strerror or error}; choose another") from error
    return listener
