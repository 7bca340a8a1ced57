"""The flags for access to the coordinator of several processes, and their checks. Imports no torch."""

from argparse import ArgumentParser, Namespace

from ..replicas.settings import RoutingSettings
from .launch import Launch
from .usage_error import UsageError


def add_coordinator_arguments(parser: ArgumentParser) -> None:
    """Add the flags that `routing_settings` reads."""
    group = parser.add_argument_group(
        "several processes", "Without these flags the coordinator of the processes listens on loopback only."
    )
    access = group.add_mutually_exclusive_group()
    access.add_argument(
        "--coordinator-key-file",
        metavar="FILE",
        help="64 hexadecimal digits that the processes of all hosts share; make it with: "
        "(umask 077; openssl rand -hex 32 > FILE)",
    )
    access.add_argument(
        "--insecure-coordinator",
        action="store_true",
        help="listen to other hosts without a key: whatever reaches the port is served, and may stop the engines",
    )


def routing_settings(arguments: Namespace, launch: Launch) -> RoutingSettings:
    """Return the settings of the launch's coordinator.

    Raises:
        UsageError: If the key file is not valid, or the processes are on several hosts and neither flag is given.
    """
    key_file, insecure = arguments.coordinator_key_file, arguments.insecure_coordinator
    if launch.is_on_several_machines and key_file is None and not insecure:
        raise UsageError(
            f"{launch.num_processes} processes on several hosts need --coordinator-key-file FILE, the same on each "
            "(made with: (umask 077; openssl rand -hex 32 > FILE)), or --insecure-coordinator on a network that you "
            "trust"
        )
    try:
        settings = RoutingSettings(key_file=key_file, insecure=insecure)
        settings.access()
    except (ValueError, ModuleNotFoundError) as error:
        raise UsageError(f"--coordinator-key-file: {error}") from error
    return settings
