"""OpenTelemetry traces: one span for each request, with the GenAI attributes.

Requires the extra `otel`. The environment variables of OpenTelemetry's packages apply (`OTEL_SERVICE_NAME`,
`OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_BSP_SCHEDULE_DELAY` and so on).
"""

import threading
import time
from typing import Any

from ..installation import require_extra
from .exchange import CLIENT_CLOSED_REQUEST, Exchange

_NAME = "megatron-mamba-cache"
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
_CLOSE_S = 3.0


class Traces:
    """Exporter of request spans; this base class ignores them."""

    def start(self) -> None:
        """Start tracing."""

    def note(self, exchange: Exchange) -> None:
        """Record the span of a request that has ended, without waiting for I/O."""

    def close(self) -> None:
        """Send the remaining spans within a few seconds."""


class ExportedTraces(Traces):
    """Exporter that sends spans to a collector's URL with OTLP over HTTP.

    The span of a request with a `traceparent` header joins the caller's trace. Health probes have no spans.
    """

    def __init__(self, endpoint: str, model_name: str) -> None:
        self._endpoint = endpoint
        self._model_name = model_name
        self._provider: Any = None
        self._tracer: Any = None

    def start(self) -> None:
        """Set up the export of spans; raise `MissingExtraError` if the extra `otel` is not installed."""
        require_extra("otel", "--otlp-traces-endpoint")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create()
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "mamba-cache"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=self._endpoint)))
        self._tracer = self._provider.get_tracer(_NAME)

    def note(self, exchange: Exchange) -> None:
        if exchange.is_probe or exchange.ended is None:
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        offset = time.time() - time.monotonic()
        operation = _OPERATIONS.get(exchange.path)
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers}
        span = self._tracer.start_span(
            exchange.method if operation is None else f"{operation} {self._model_name}",
            context=extract(carrier),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(exchange.arrived + offset),
            attributes=_attributes(exchange, operation, self._model_name),
        )
        if exchange.first_token is not None:
            span.add_event("first token", timestamp=_nanoseconds(exchange.first_token + offset))
        if exchange.status >= 500 or exchange.status == CLIENT_CLOSED_REQUEST or exchange.has_failed:
            span.set_status(Status(StatusCode.ERROR, exchange.error))
        span.end(_nanoseconds(exchange.ended + offset))

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def _attributes(exchange: Exchange, operation: str | None, model_name: str) -> dict[str, Any]:
    """Return the HTTP and GenAI attributes for a request's span."""
    found: dict[str, Any] = {
        "http.request.method": exchange.method,
        "url.path": exchange.path,
        "http.response.status_code": exchange.status,
        "error.type": exchange.error or (str(exchange.status) if exchange.status >= 400 else None),
        "mamba_cache.request_id": exchange.request_id,
    }
    if operation is not None:
        found |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": _NAME,
            "gen_ai.request.model": model_name,
            "gen_ai.response.model": model_name,
            "gen_ai.response.finish_reasons": exchange.finish_reasons or None,
            "gen_ai.usage.input_tokens": exchange.prompt_tokens,
            "gen_ai.usage.output_tokens": exchange.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": exchange.cached_tokens,
            "gen_ai.latency.time_in_queue": exchange.queue_seconds,
            "gen_ai.latency.time_to_first_token": exchange.seconds_to(exchange.first_token),
            "gen_ai.latency.e2e": exchange.seconds_to(exchange.ended),
        }
    return {name: value for name, value in found.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
