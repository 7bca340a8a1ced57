"""A model, its engine, and the server around it, as the flags of serve say it."""

import asyncio
import socket
from argparse import Namespace
from collections.abc import Sequence

from ..mcore.engine import MambaCacheEngine
from ..mcore.model_shape import HybridModelShape
from ..mcore.ranks import ranks_of_process
from ..routing.settings import RoutingSettings
from ..server.app import Server, ServerSettings
from ..server.engine_thread import EngineThread
from ..server.limits import ServerLimits
from ..server.request_faults import RequestRules
from ..server.running import DrainingServer
from ..server.tenants import ApiKeys
from .arguments import cache_config
from .default_settings import default_settings
from .drafters import drafter_maker
from .model_choice import ModelDirectory
from .ready_model import engine_for, ready_model
from .usage_error import UsageError

_MIB = 2**20
_JOIN_S = 60.0
_NUM_CUDA_GRAPHS = 9  # a server steps for long, and a step without takes several times as long


class Serving:
    """One process's model and the server's settings.

    Raises:
        UsageError: If the model cannot be loaded, or settings do not fit it.
    """

    def __init__(
        self, arguments: Namespace, keys: Sequence[str], directory: ModelDirectory | None, device: str
    ) -> None:
        self._model = ready_model(directory, arguments.dtype)
        model = self._model.model
        shape = HybridModelShape.of(model, ranks_of_process())
        settings = default_settings(shape, model.max_sequence_length)
        settings["num_cuda_graphs"] = _NUM_CUDA_GRAPHS if device == "cuda" else 0
        if arguments.max_running_requests is not None:
            running = arguments.max_running_requests
            settings |= {"max_requests": running, "max_tokens": max(settings["max_tokens"], running)}
        self._config = cache_config(arguments, settings)
        self._drafter = drafter_maker(arguments, shape.vocab_size)
        tokenizer = self._model.tokenizer
        self.settings = ServerSettings(
            model_name=arguments.served_model_name or _name_of(directory),
            tokenizer=tokenizer,
            end_ids=frozenset({tokenizer.eod, *getattr(tokenizer, "other_end_ids", ())} - {-1}),
            keys=_keys_of(arguments, keys),
            limits=_limits_of(arguments, self._config.max_requests),
        )
        self._first_line = f"{self._model.description}, on {device}"

    def engine(self) -> MambaCacheEngine:
        """Build the engine.

        Raises:
            UsageError: If the settings do not fit the model or the memory.
        """
        drafter = self._drafter() if self._config.num_speculative_tokens else None
        return engine_for(self._model, self._config, 0, drafter)

    def run(self, engine: MambaCacheEngine, listener: socket.socket) -> int:
        """Serve with an engine of this process; return the exit status."""
        return self._serve(Server(EngineThread(engine, self.settings.end_ids), self.settings), listener)

    def run_replica(self, engine: MambaCacheEngine, listener: socket.socket | None, routing: RoutingSettings) -> int:
        """Serve with the engines of all processes behind a coordinator; return the exit status.

        Args:
            listener: Of the process that has the front end; None in all others.
            routing: Settings of the coordinator.
        """
        from ..server.coordinator_backend import CoordinatorBackend
        from ..server.replica import ReplicaThread, serve_replica

        if listener is None:
            serve_replica(engine, routing)
            return 0
        replica = ReplicaThread(engine, routing)
        rules = RequestRules.of(engine.context)
        backend = CoordinatorBackend(replica.start(), rules, self.settings.end_ids, routing.access())
        status = self._serve(Server(backend, self.settings), listener)
        return status if replica.join(_JOIN_S) else 1

    def _serve(self, server: Server, listener: socket.socket) -> int:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        lines = f"{self._first_line}\nserving {self.settings.model_name} on {url}"
        running = DrainingServer(server, on_listening=lambda: print(lines, flush=True))
        asyncio.run(running.serve(sockets=[listener]))
        return 0 if server.backend.state.failure is None else 1


def _name_of(directory: ModelDirectory | None) -> str:
    return "random" if directory is None else directory.path.resolve().name


def _keys_of(arguments: Namespace, keys: Sequence[str]) -> ApiKeys:
    try:
        return ApiKeys(keys, arguments.admin_api_key)
    except ValueError as error:
        raise UsageError(f"--api-key: {error}") from error


def _limits_of(arguments: Namespace, max_running: int) -> ServerLimits:
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
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
