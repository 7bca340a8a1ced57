"""OpenTelemetry: one span for each request, sent to a collector over HTTP."""

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_mamba_cache.command_line.main import main
from megatron_mamba_cache.installation import MissingExtraError
from megatron_mamba_cache.server.backend import Progress
from megatron_mamba_cache.server.traces import ExportedTraces
from tests.server.front_end import FrontEnd, front_end, request_bytes, wait_until
from tests.server.scripted_agent import TEMPLATES, agent_tokenizer

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Collector that receives traces over HTTP and stores their spans."""

    def __init__(self) -> None:
        messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                for resource in messages.ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.services.add(values_of(resource.resource)["service.name"])
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def values_of(span: Any) -> dict[str, Any]:
    """Return the attributes of a span."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {one.key: plain(one.value) for one in span.attributes}


@contextmanager
def traced(tmp_path: Path) -> Iterator[tuple[FrontEnd, Collector]]:
    """Context manager: run a front end; on exit, its spans have reached the collector."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    collector = Collector()
    tokenizer = agent_tokenizer(tmp_path / "tokenizer", TEMPLATES["hermes"])
    try:
        with front_end(tokenizer=tokenizer, traces=ExportedTraces(collector.url, "scripted")) as server:
            yield server, collector
    finally:
        collector.close()


BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "completion": ("/v1/completions", {"prompt": "abc def"}, "text_completion scripted"),
    "stream": ("/v1/completions", {"prompt": [5, 6, 7], "stream": True, "n": 2}, "text_completion scripted"),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "chat scripted"),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "stream": True}, "chat scripted"),
}


def test_each_request_has_a_span_with_token_counts_and_times(tmp_path: Path) -> None:
    with traced(tmp_path) as (server, collector):
        began = time.time()
        for path, body, _ in BODIES.values():
            connection = server.connection(request_bytes({**body, "max_tokens": 9}, path))
            wait_until(lambda: len(server.backend.running) == body.get("n", 1))  # noqa: B023
            time.sleep(0.05)
            server.backend.deliver(Progress((97, 98), cached_tokens=1, running_s=0.02))
            server.backend.deliver(Progress((99,), cached_tokens=1, end="length"))
            wait_until(lambda: not server.server.app.num_open)
            connection.close()
        assert httpx.get(f"{server.listening.url}/health").status_code == 200
    assert collector.services == {"mamba-cache"}
    assert [span.name for span in collector.spans] == [name for _, _, name in BODIES.values()]
    for span, (path, body, _) in zip(collector.spans, BODIES.values(), strict=True):
        found, num_choices = values_of(span), body.get("n", 1)
        assert (found["http.response.status_code"], found["url.path"]) == (200, path)
        assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "scripted"
        assert found["gen_ai.usage.output_tokens"] == 3 * num_choices and found["gen_ai.usage.input_tokens"] > 0
        assert found["gen_ai.usage.cache_read.input_tokens"] == 1
        assert found["gen_ai.response.finish_reasons"] == ["length"] * num_choices
        queued, first, whole = (found[f"gen_ai.latency.{name}"] for name in WAITS)
        assert 0.03 <= queued < first <= whole < 10 and "error.type" not in found
        assert began - 1 < span.start_time_unix_nano / 1e9 < span.end_time_unix_nano / 1e9 < time.time() + 1
        assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(whole * 1e9, abs=1e6)
        assert [event.name for event in span.events] == ["first token"] and span.kind == 2


WAITS = ("time_in_queue", "time_to_first_token", "e2e")


def test_request_with_a_traceparent_header_joins_the_callers_trace(tmp_path: Path) -> None:
    with traced(tmp_path) as (server, collector), server.client() as http:
        http.get("/v1/models", headers={"traceparent": f"00-{TRACE}-{CALLER}-01"})
        http.get("/v1/models", headers={"traceparent": "nonsense"})
        http.get("/v1/models", headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})  # not sampled by the caller
    child, root = collector.spans
    assert (child.trace_id.hex(), child.parent_span_id.hex()) == (TRACE, CALLER)
    assert root.trace_id.hex() != TRACE and not root.parent_span_id
    assert child.name == "GET" and values_of(child)["url.path"] == "/v1/models"


def test_span_of_a_failed_request_has_the_error_type(tmp_path: Path) -> None:
    with traced(tmp_path) as (server, collector), server.client() as http:
        assert http.post("/v1/completions", json={"prompt": 1.5}).status_code == 400
        for end in (Progress(end="error", error="out of luck"), None):
            connection = server.connection(request_bytes({"prompt": "abc", "max_tokens": 9, "stream": True}))
            wait_until(lambda: server.backend.running)
            if end is not None:
                server.backend.deliver(end)
                wait_until(lambda: not server.server.app.num_open)
            connection.close()
            wait_until(lambda: not server.server.app.num_open)
    found = [(values_of(span), span.status.code) for span in collector.spans]
    assert [(one["http.response.status_code"], code) for one, code in found] == [(400, 0), (200, 2), (499, 2)]
    assert [one["error.type"] for one, _ in found][1:] == ["engine_error", "499"] and found[0][0]["error.type"]
    assert all("abc" not in str(one) for one, _ in found)


def test_environment_variables_set_service_name_and_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with traced(tmp_path) as (server, collector), server.client() as http:
        http.get("/v1/models")
        http.get("/v1/models", headers={"traceparent": f"00-{TRACE}-{CALLER}-01"})
    assert collector.services == {"chat"} and [span.trace_id.hex() for span in collector.spans] == [TRACE]


def test_unresponsive_collector_delays_neither_requests_nor_shutdown() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with front_end(traces=ExportedTraces("http://127.0.0.1:9/v1/traces", "scripted")) as server:
        with server.client() as http:
            assert http.get("/v1/models").status_code == 200
        began = time.monotonic()
        server.listening.drain()
        server.listening.thread.join(20)
        assert not server.listening.thread.is_alive() and time.monotonic() - began < 8


@pytest.mark.parametrize("url", ["localhost:4317", "grpc://collector:4317", "http://"])
def test_error_names_the_invalid_trace_endpoint(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--random-model", "--port", "0", "--otlp-traces-endpoint", url]) == 2
    assert "--otlp-traces-endpoint is" in capsys.readouterr().err


def test_error_names_the_missing_extra_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(extra: str, purpose: str) -> None:
        raise MissingExtraError(f"{purpose} needs what [{extra}] brings")

    monkeypatch.setattr("megatron_mamba_cache.command_line.server_arguments.require_extra", missing)
    assert main(["serve", "--random-model", "--port", "0", "--otlp-traces-endpoint", "http://a/v1/traces"]) == 2
    assert "--otlp-traces-endpoint needs what [otel] brings" in capsys.readouterr().err
