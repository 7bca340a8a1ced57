"""Define and check the flags for the server, its API keys and its coordinator."""

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path
from urllib.parse import urlsplit

from ..installation import MissingExtraError, require_extra
from ..replicas.settings import RoutingSettings
from ..server.limits import ServerLimits
from ..server.parsers.families import AUTO, NONE, REASONING_PARSERS, TOOL_CALL_PARSERS
from ..server.tenants import ApiKeys
from .flag_sources import UsageError
from .launch import Launch

_LARGEST_PORT = 65_535
_MIB = 2**20
_NAMED_KEY = re.compile(r"([A-Za-z0-9._-]{1,64}):\s+(\S.*)")
_FLAGS_OF_LIMITS = {
    "max_running": "--max-running-requests",
    "max_queued": "--max-queued-requests",
    "max_choices": "--max-choices",
    "max_body_bytes": "--max-body-mb",
    "drain_s": "--drain-seconds",
    "transcript_bytes": "--transcript-mb",
    "response_bytes": "--responses-mb",
}
_CORS_IN_WORDS = (
    "origin of web pages that may call the API, such as https://chat.example; * for all; may be repeated "
    "(default: none)"
)

CARD_IN_WORDS = (
    "With --hf-model or --load on a GPU, the defaults are: KV blocks and states fill the free memory, blocks have at "
    "least 256 tokens, sequences are as long as the model allows, up to 256 requests run at once, and 9 batch sizes "
    "are captured as CUDA graphs."
)


def add_server_arguments(parser: ArgumentParser) -> None:
    """Add the flags for the server and its limits to a parser."""
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=5000, help="port to listen on; 0 selects a free port (default: 5000)")
    names = "model names that clients may use; replies contain the first (default: the directory's name)"
    add("--served-model-name", nargs="+", metavar="NAME", help=names)
    key = (
        "API key; may be repeated. Requests with different keys share no cached prefixes. Without this flag, no key is "
        "needed"
    )
    add("--api-key", action="append", default=[], metavar="KEY", help=key)
    admin = "API key that is needed to read metrics, flush the cache, pause and abort; may be repeated"
    add("--admin-api-key", action="append", default=[], metavar="KEY", help=admin)
    keys = (
        "file with one API key per line, as KEY or NAME: KEY; logs show the name. Other users of the machine can see "
        "flags, but not the contents of a file"
    )
    add("--api-key-file", metavar="FILE", help=keys)
    add("--admin-api-key-file", metavar="FILE", help="file with admin API keys, in the same format")
    add("--cors-origin", action="append", default=[], metavar="ORIGIN", help=_CORS_IN_WORDS)
    line = "format of the line on stdout for each completed request except health probes (default: text)"
    add("--access-log", choices=("text", "json", "off"), default="text", help=line)
    traces = "URL that accepts OpenTelemetry traces, such as http://localhost:4318/v1/traces; needs the extra otel"
    add("--otlp-traces-endpoint", metavar="URL", help=traces)
    info = "serve the tokenizer's settings and chat template at /tokenizer_info, to every API key"
    add("--enable-tokenizer-info-endpoint", action="store_true", help=info)
    load = "append a line per request to this file: times, lengths and salted hashes, no text; see plan --trace"
    add("--record-load", metavar="FILE", help=load)
    add = parser.add_argument_group("reply formats", "By default, the chat template determines them.").add_argument
    parsers = (AUTO, NONE, *TOOL_CALL_PARSERS)
    add("--tool-call-parser", choices=parsers, default=AUTO, help="format of the model's tool calls (default: auto)")
    parsers = (AUTO, NONE, *REASONING_PARSERS)
    add("--reasoning-parser", choices=parsers, default=AUTO, help="format of the model's reasoning (default: auto)")
    add = parser.add_argument_group("memory of a GPU", CARD_IN_WORDS).add_argument
    fraction = "fraction of the memory free after loading the weights, for KV blocks and states (default: 0.9)"
    add("--memory-fraction", type=float, default=0.9, metavar="F", help=fraction)
    _add_limits(parser)


def _add_limits(parser: ArgumentParser) -> None:
    in_words = "Requests that exceed a limit are rejected, with status 429 and the seconds to wait if a retry can help."
    add = parser.add_argument_group("limits", in_words).add_argument
    running = "maximum concurrently running requests (default: 16; on a GPU, as many as fit, up to 256)"
    add("--max-running-requests", type=int, metavar="N", help=running)
    queued = "maximum queued requests (default: 1024)"
    add("--max-queued-requests", type=int, default=1024, metavar="N", help=queued)
    choices = "maximum choices per request: its number of prompts times n (default: 1024)"
    add("--max-choices", type=int, default=1024, metavar="N", help=choices)
    body = "maximum size of a request body in MiB (default: 4)"
    add("--max-body-mb", type=float, default=4.0, metavar="M", help=body)
    drain = "seconds after SIGTERM in which accepted requests may finish (default: 25)"
    add("--drain-seconds", type=float, default=25.0, metavar="S", help=drain)
    transcripts = "MiB per API key for storing the exact tokens of earlier turns (default: 16; 0 is off)"
    add("--transcript-mb", type=float, default=16.0, metavar="M", help=transcripts)
    responses = "MiB per API key for storing responses of /v1/responses (default: 16; 0 is off)"
    add("--responses-mb", type=float, default=16.0, metavar="M", help=responses)


def server_limits(arguments: Namespace, max_running: int) -> ServerLimits:
    """Return the server limits that the flags set; raise `UsageError` if a limit is invalid."""
    max_body = int(arguments.max_body_mb * _MIB)
    try:
        return ServerLimits(
            max_running=max_running,
            max_queued=arguments.max_queued_requests,
            max_choices=arguments.max_choices,
            max_body_bytes=max_body,
            max_buffered_bytes=max(16 * max_body, ServerLimits().max_buffered_bytes),
            drain_s=arguments.drain_seconds,
            transcript_bytes=int(arguments.transcript_mb * _MIB),
            response_bytes=int(arguments.responses_mb * _MIB),
        )
    except ValueError as error:
        raise UsageError(f"{_FLAGS_OF_LIMITS[str(error).split()[0]]}: {error}") from error


def _check_traces(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(
            f"--otlp-traces-endpoint is {url!r}; it must be an HTTP URL that accepts traces, such as "
            "http://localhost:4318/v1/traces"
        )
    try:
        require_extra("otel", "--otlp-traces-endpoint")
    except MissingExtraError as error:
        raise UsageError(str(error)) from error


def _check_record(path: str) -> None:
    if path.endswith(".gz"):
        raise UsageError(
            f"--record-load {path} must not end in .gz, because lines are appended uncompressed; compress it later"
        )
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise UsageError(
            f"--record-load {path} cannot be written: {error.strerror or error}; give another file"
        ) from error


def check_server_arguments(arguments: Namespace) -> None:
    """Raise `UsageError` if a server flag has an invalid value."""
    if not 0 <= arguments.port <= _LARGEST_PORT:
        raise UsageError(f"--port is {arguments.port}; it must be between 0 (any free port) and {_LARGEST_PORT}")
    if not 0 < arguments.memory_fraction <= 1:
        raise UsageError(f"--memory-fraction is {arguments.memory_fraction}; it must be above 0 and at most 1")
    if arguments.otlp_traces_endpoint is not None:
        _check_traces(arguments.otlp_traces_endpoint)
    if arguments.record_load is not None:
        _check_record(arguments.record_load)
    running = arguments.max_running_requests
    if running is not None and running < 1:
        raise UsageError(f"--max-running-requests is {running}; it must be at least 1")
    for origin in arguments.cors_origin:
        _check_origin(origin)
    for name in ("max_body_mb", "transcript_mb", "responses_mb"):
        if not 0 <= getattr(arguments, name) < 2**20:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} is {getattr(arguments, name)}; it must be at least 0 and below {2**20}")
    server_limits(arguments, 1 if running is None else running)


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    is_origin = parts.scheme in ("http", "https") and parts.netloc and origin == f"{parts.scheme}://{parts.netloc}"
    if origin != "*" and not is_origin:
        raise UsageError(
            f"--cors-origin is {origin!r}; it must be SCHEME://HOST or SCHEME://HOST:PORT without a path, or * for all"
        )


def add_coordinator_arguments(parser: ArgumentParser) -> None:
    """Add the flags for the coordinator; `routing_settings` reads them."""
    in_words = "The coordinator of several processes listens only on loopback, unless one of these flags is given."
    add = parser.add_argument_group("coordinator", in_words).add_mutually_exclusive_group().add_argument
    key = (
        "file with a key of 64 hexadecimal digits, the same on all hosts; create it with: "
        "(umask 077; openssl rand -hex 32 > FILE)"
    )
    add("--coordinator-key-file", metavar="FILE", help=key)
    insecure = "accept other hosts without a key: any client that reaches the port can stop the engines"
    add("--insecure-coordinator", action="store_true", help=insecure)


def routing_settings(arguments: Namespace, launch: Launch) -> RoutingSettings:
    """Return the settings for the coordinator that routes requests to the replicas of a launch.

    Raises:
        UsageError: If the key file is invalid, or if there are several hosts and no coordinator flag is given.
    """
    key_file, insecure = arguments.coordinator_key_file, arguments.insecure_coordinator
    if launch.is_on_several_machines and key_file is None and not insecure:
        raise UsageError(
            f"{launch.num_processes} processes on several hosts need --coordinator-key-file FILE with the same key on "
            "each (create it with: (umask 077; openssl rand -hex 32 > FILE)), or --insecure-coordinator on a trusted "
            "network"
        )
    try:
        settings = RoutingSettings(key_file=key_file, insecure=insecure)
        settings.access()
    except (ValueError, ModuleNotFoundError) as error:
        raise UsageError(f"--coordinator-key-file: {error}") from error
    return settings


def api_keys_of(arguments: Namespace) -> ApiKeys:
    """Return the API keys from flags and key files; raise `UsageError` for an empty file or an invalid key."""
    users = _read_keys("--api-key-file", arguments.api_key_file)
    admins = _read_keys("--admin-api-key-file", arguments.admin_api_key_file)
    names = {key: name for keys in (users, admins) for key, name in keys.items() if name}
    try:
        return ApiKeys([*arguments.api_key, *users], [*arguments.admin_api_key, *admins], names)
    except ValueError as error:
        raise UsageError(f"--api-key: {error}") from error


def _read_keys(flag: str, path: str | None) -> dict[str, str]:
    """Read a file with lines `KEY` or `NAME: KEY`; return key → name, where "" means that the key has no name."""
    found: dict[str, str] = {}
    if path is None:
        return found
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: {error}") from error
    for line in filter(None, map(str.strip, lines)):
        named = _NAMED_KEY.fullmatch(line)
        name, key = ("", line) if named is None else named.groups()
        found[key] = name or found.get(key, "")
    if not found:
        raise UsageError(f"{flag} {path}: the file has no keys; write one key per line")
    return found
