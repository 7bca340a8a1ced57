"""Load the model, build the engine and run the server for the serve command."""

import asyncio
import socket
from argparse import Namespace
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..config import CacheConfig
from ..mcore.engine import MambaCacheEngine
from ..mcore.model_ranks import ranks_of_process
from ..mcore.model_reading import model_shape_of
from ..ranks.agreement import resolved_settings
from ..recurrences.model_shape import HybridModelShape
from ..replicas.settings import RoutingSettings
from ..server.app import Server, ServerSettings
from ..server.engine_thread import EngineThread
from ..server.exchange import AccessLog, write_line
from ..server.load_record import LoadFile, LoadRecord
from ..server.parsers.families import AUTO, NONE, ReplySyntax, reply_syntax
from ..server.prompts import template_of
from ..server.running import DrainingServer
from ..server.tenants import ApiKeys
from ..server.traces import ExportedTraces, Traces
from .arguments import cache_config, model_share, with_auto_drafts
from .cache_flags import given_budget, given_settings
from .expected_memory import check_memory
from .flag_sources import UsageError
from .model_choice import ModelDirectory, fills_card
from .ready_model import WeightFlags, drafter_maker, engine_for, ready_model
from .server_arguments import server_limits
from .sizing import NUM_CUDA_GRAPHS, Card, card_draft_settings, card_settings, default_draft_settings, default_settings

_JOIN_S = 60.0


class Serving:
    """This process's model and the server's settings; the constructor raises `UsageError` if either is unusable."""

    def __init__(self, arguments: Namespace, keys: ApiKeys, directory: ModelDirectory | None, device: str) -> None:
        on_card = fills_card(directory, device)
        if not on_card:
            _check_memory(arguments, directory, device, None)
        elif given_budget(arguments) is not None:  # with a given budget, the free memory is not needed
            _check_memory(arguments, directory, device, Card(0, arguments.memory_fraction, 0))
        self._log_level = arguments.log_level
        self._model = ready_model(directory, arguments.dtype, device, WeightFlags.of(arguments))
        arguments = with_auto_drafts(arguments, has_head=self._model.mtp is not None)
        model = self._model.model
        shape = model_shape_of(model, ranks_of_process(), self._model.mtp)
        self._drafter = drafter_maker(
            arguments,
            self._model,
            lambda shape, length: _draft_settings(shape, length, self._config, arguments, self._card),
        )
        self._card = _card_of(model, arguments.memory_fraction) if on_card else None
        settings = _settings(shape, model.max_sequence_length, arguments, device, self._card)
        config = cache_config(arguments, settings)
        self._config = resolved_settings(config, shape, ranks_of_process())
        tokenizer = self._model.tokenizer
        own_name = "random" if directory is None else directory.path.resolve().name
        name, *other_names = dict.fromkeys(arguments.served_model_name or [own_name])
        record, endpoint = arguments.record_load, arguments.otlp_traces_endpoint
        self.settings = ServerSettings(
            model_name=name,
            other_names=tuple(other_names),
            tokenizer=tokenizer,
            end_ids=frozenset({tokenizer.eod, *getattr(tokenizer, "other_end_ids", ())} - {-1}),
            keys=keys,
            limits=server_limits(arguments, self._config.max_requests),
            versions={"version": __version__, **{name: version(name) for name in ("megatron-core", "torch")}},
            access_log=AccessLog(arguments.access_log),
            cors_origins=tuple(arguments.cors_origin),
            syntax=_syntax_of(tokenizer, arguments),
            load_record=LoadRecord() if record is None else LoadFile(Path(record), self._config.block_size_tokens),
            traces=Traces() if endpoint is None else ExportedTraces(endpoint, name),
            describes_tokenizer=arguments.enable_tokenizer_info_endpoint,
        )
        self._first_line = f"{self._model.description}, on {device}\n{_sizes_line(self._config)}"

    def engine(self) -> MambaCacheEngine:
        """Build the engine; raise `UsageError` if the settings do not suit the model or need too much memory."""
        return engine_for(self._model, self._config, 0, self._drafter)

    def run(self, engine: MambaCacheEngine, listener: socket.socket) -> int:
        """Serve with one engine, in this process, and return the exit status."""
        return self._serve(Server(EngineThread(engine, self.settings.end_ids), self.settings), listener)

    def run_replica(self, engine: MambaCacheEngine, listener: socket.socket | None, routing: RoutingSettings) -> int:
        """Serve with the engines of all processes through a coordinator, and return the exit status.

        The first process has a `listener` and runs the HTTP server and the coordinator. The other processes run the
        requests that the coordinator sends to them.
        """
        from ..server.coordinator_backend import CoordinatorBackend
        from ..server.replica import ReplicaThread, serve_replica

        if listener is None:
            serve_replica(engine, routing)
            return 0
        replica = ReplicaThread(engine, routing)
        rules, settings = engine.context.request_rules, self.settings
        address = replica.start()
        backend = CoordinatorBackend(address, rules, settings.end_ids, routing.access(), settings.tokenizer)
        status = self._serve(Server(backend, self.settings), listener)
        return status if replica.join(_JOIN_S) else 1

    def _serve(self, server: Server, listener: socket.socket) -> int:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        running = DrainingServer(
            server,
            on_listening=lambda: print(self._first_line, flush=True),
            on_ready=lambda: print(f"serving {self.settings.model_name} on {url}", flush=True),
            log_level=self._log_level,
        )
        asyncio.run(running.serve(sockets=[listener]))
        write_line(server.app.summary())
        return 0 if server.backend.state.failure is None else 1


def _check_memory(arguments: Namespace, directory: ModelDirectory | None, device: str, card: Card | None) -> None:
    """Raise `UsageError` if the memory flags are too small for the model. The weights are not needed."""
    check_memory(
        arguments,
        directory,
        device,
        lambda shape, length: _settings(shape, length, arguments, device, card),
        lambda shape, length, engine: _draft_settings(shape, length, engine, arguments, card),
        loads_head=WeightFlags.of(arguments).mtp != "none",
    )


def _settings(
    shape: HybridModelShape, max_length: int, arguments: Namespace, device: str, card: Card | None
) -> dict[str, Any]:
    """Return default fields of `CacheConfig` that fill the GPU memory of `card`, or suit the model if it is None."""
    running = arguments.max_running_requests
    limit = {} if running is None else {"max_requests": running}
    if card is not None:
        given = given_settings(arguments) | limit | {"cache_gb": given_budget(arguments)}
        own = replace(card, share=model_share(arguments))
        return card_settings(shape, max_length, own, given, ranks_of_process())
    settings = default_settings(shape, max_length) | limit
    settings["max_tokens"] = max(settings["max_tokens"], settings["max_requests"])
    settings["num_cuda_graphs"] = NUM_CUDA_GRAPHS if device == "cuda" else 0
    return settings


def _draft_settings(
    shape: HybridModelShape, max_length: int, engine: CacheConfig, arguments: Namespace, card: Card | None
) -> dict[str, Any]:
    """Return the default values of `CacheConfig` fields for a draft model."""
    graphs = {"num_cuda_graphs": engine.num_cuda_graphs}
    if card is None:
        return default_draft_settings(shape, max_length, given_budget(arguments), ranks_of_process()) | graphs
    return card_draft_settings(shape, max_length, engine, card, given_budget(arguments), ranks_of_process()) | graphs


def _card_of(model: Any, fraction: float) -> Card:
    """Return the free memory of the GPU and the model's widest layer; collective over the model's ranks."""
    torch.cuda.empty_cache()
    (free,) = ranks_of_process().least([torch.cuda.mem_get_info()[0]])
    widest = max((weight.shape[0] for weight in model.decoder.parameters() if weight.dim() == 2), default=0)
    return Card(free, fraction, max(widest, expert_width(model.config)))


def expert_width(config: Any) -> int:
    """Return the mean output width of the two expert GEMMs, times the experts per token; 0 without MoE layers."""
    if not config.num_moe_experts:
        return 0
    inner = config.moe_ffn_hidden_size // config.tensor_model_parallel_size
    return int(config.moe_router_topk * (inner + (config.moe_latent_size or config.hidden_size)) // 2)


def _sizes_line(config: CacheConfig) -> str:
    return (
        f"{config.cache_gb:.3g} GiB for KV blocks of {config.block_size_tokens} tokens and states; up to "
        f"{config.max_requests} requests at once, {config.max_sequence_length} tokens a request and "
        f"{config.max_tokens} a step"
    )


def _syntax_of(tokenizer: Any, arguments: Namespace) -> ReplySyntax:
    with_tools, without = (template_of(tokenizer, has_tools=has_tools) for has_tools in (True, False))
    if arguments.tool_call_parser not in (AUTO, NONE) and "tools" not in with_tools:
        raise UsageError(
            f"--tool-call-parser is {arguments.tool_call_parser}, but the model has no chat template with tools; "
            "leave the flag out, or add such a template to the model's directory"
        )
    syntax = reply_syntax(with_tools, arguments.tool_call_parser, arguments.reasoning_parser)
    plain = reply_syntax(without, NONE, arguments.reasoning_parser)
    return replace(syntax, reasoning=syntax.reasoning or plain.reasoning)
