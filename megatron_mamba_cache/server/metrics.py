"""Metrics for Prometheus and the dashboard: the engine's latest snapshot and the front end's own counters."""

from collections.abc import Iterable, Sequence
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..metrics import CacheCounters, CacheSnapshot
from .backend import Backend
from .exchange import Exchange
from .job import Job
from .limits import QueueGate
from .metric_texts import CACHE_BYTES, DISK_BYTES, HOST_BYTES, KV_BLOCKS, STATE_SLOTS, TIER_COPIES, counter_text
from .quantiles import Durations

PREFIX = "mamba_cache_"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)


class SnapshotCollector(Collector):
    """Reads a backend's latest state on each scrape."""

    def __init__(self, backend: Backend, gate: QueueGate) -> None:
        self._backend = backend
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        """Yield every counter of the cache, the use of slots and blocks, and the queue."""
        state = self._backend.state
        yield _gauge("ready", "1 once the engine is warmed up and while it works", state.is_ready and not state.failure)
        yield _gauge("requests_running", "Requests that the engine runs", state.num_running)
        yield _gauge("requests_waiting", "Requests that wait for the engine", state.num_waiting)
        yield _gauge("requests_inside", "Requests that run or wait, those on their way included", self._gate.num_inside)
        yield _counter("requests_refused", "Requests that the full queue refused", self._gate.num_refused)
        yield _counter("generated_tokens", "Tokens generated for all requests", state.generated_tokens)
        if state.cache is not None:
            yield from _cache_metrics(state.cache)


class ServerMetrics:
    """A server's registry and its own counters; also the `TokenTimes` of all jobs.

    Args:
        model_name: What clients call the model.
    """

    def __init__(self, backend: Backend, gate: QueueGate, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(SnapshotCollector(backend, gate))
        ProcessCollector(registry=self.registry)
        Info(f"{PREFIX}model", "The model that is served", registry=self.registry).info({"model": model_name})
        self.responses = self._counter(
            "http_responses",
            "HTTP responses by status, those to probes excepted; 499: the client left before the last byte",
            ["status"],
        )
        self.probe_responses = self._counter(
            "probe_responses",
            "HTTP responses to health checks, scrapes and the dashboard's polling",
            ["path", "status"],
        )
        self.replies = self._counter(
            "replies", "Replies by how they ended; cut: by an error or because the client left", ["finish_reason"]
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the requests that the engine was given")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's submission to the engine to its first token", _SECONDS
        )
        self.duration = self._histogram(
            "request_seconds", "From a request's submission to the engine to the end of its replies", _SECONDS
        )
        self.queueing = self._histogram(
            "queue_seconds", "From a request's arrival, before its prompt is tokenized, to its first step", _SECONDS
        )
        self.inter_token = self._histogram(
            "inter_token_seconds", "From a generated token to the next one of its reply", _GAP_SECONDS
        )
        self.recent_first_token, self.recent_inter_token = Durations(), Durations()

    def note(self, job: Job) -> None:
        """Count a job that has ended."""
        self.prompt_tokens.inc(sum(len(prompt.token_ids) for prompt in job.prompts))
        for choice in job.choices:
            self.replies.labels(choice.reply.finish_reason or "cut").inc()
        if job.times.ended is not None:
            self.duration.observe(job.times.ended - job.times.started)

    def note_queued(self, seconds: float) -> None:
        """See `TokenTimes`."""
        self.queueing.observe(seconds)

    def note_exchange(self, exchange: Exchange) -> None:
        """Count a request that has ended, by its status."""
        if exchange.is_probe:
            self.probe_responses.labels(exchange.path, str(exchange.status)).inc()
        else:
            self.responses.labels(str(exchange.status)).inc()

    def note_first_token(self, seconds: float) -> None:
        """See `TokenTimes`."""
        self.first_token.observe(seconds)
        self.recent_first_token.add(seconds)

    def note_gap(self, seconds: float, num_tokens: int) -> None:
        """See `TokenTimes`; several tokens of a step share its time."""
        for _ in range(num_tokens):
            self.inter_token.observe(seconds / num_tokens)
        self.recent_inter_token.add(seconds / num_tokens, num_tokens)

    def num_responses(self) -> dict[str, int]:
        """Return how many responses had each status."""
        samples = [sample for metric in self.responses.collect() for sample in metric.samples]
        return {one.labels["status"]: int(one.value) for one in samples if one.name.endswith("_total")}

    def take_recent(self) -> tuple[Durations, Durations]:
        """Return the times to first tokens and between tokens since the last call."""
        taken = self.recent_first_token, self.recent_inter_token
        self.recent_first_token, self.recent_inter_token = Durations(), Durations()
        return taken

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"{PREFIX}{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"{PREFIX}{name}", text, buckets=buckets, registry=self.registry)


def _cache_metrics(cache: CacheSnapshot) -> Iterable[Metric]:
    for entry in fields(CacheCounters):
        value = getattr(cache.counters, entry.name)
        if isinstance(value, int):
            yield _counter(entry.name, counter_text(entry.name), value)
    reasons = CounterMetricFamily(
        f"{PREFIX}requests_without_hit", "Requests that skipped nothing of their prompt", labels=["reason"]
    )
    for reason, count in sorted(cache.counters.requests_without_hit.items()):
        reasons.add_metric([reason], count)
    yield reasons
    for name, label, text, counts in (
        ("state_slots", "owner", STATE_SLOTS, cache.state_slots),
        ("kv_blocks", "kind", KV_BLOCKS, cache.kv_blocks),
        ("cache_bytes", "use", CACHE_BYTES, cache.cache_bytes),
        ("host_bytes", "use", HOST_BYTES, cache.host_bytes),
        ("disk_bytes", "use", DISK_BYTES, cache.disk_bytes),
        ("tier_copies", "to", TIER_COPIES, cache.tier_copies),
    ):
        family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=[label])
        for kind, count in counts.items():
            family.add_metric([kind], count)
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}{name}", text, value=value)
