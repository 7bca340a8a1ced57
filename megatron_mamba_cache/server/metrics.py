"""What Prometheus, and the dashboard, read: the engine's latest snapshot, and what the front end counts itself."""

from collections.abc import Iterable
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..metrics import CacheCounters, CacheSnapshot
from .backend import Backend
from .job import Job
from .limits import QueueGate

PREFIX = "mamba_cache_"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class SnapshotCollector(Collector):
    """Reads a backend's latest state whenever it is asked."""

    def __init__(self, backend: Backend, gate: QueueGate) -> None:
        self._backend = backend
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        """Yield every counter of the cache, what slots and blocks are used for, and the queue."""
        state = self._backend.state
        yield _gauge("ready", "1 once the engine is warmed up and while it works", state.is_ready and not state.failure)
        yield _gauge("requests_running", "Requests that the engine runs", state.num_running)
        yield _gauge("requests_waiting", "Requests that wait for the engine", state.num_waiting)
        yield _gauge("requests_inside", "Requests that run or wait, those on their way included", self._gate.num_inside)
        yield _counter("requests_refused", "Requests that the full queue refused", self._gate.num_refused)
        yield _counter("generated_tokens", "Tokens generated", state.generated_tokens)
        if state.cache is not None:
            yield from _cache_metrics(state.cache)


class ServerMetrics:
    """The registry of a server, and the metrics that it counts of its own."""

    def __init__(self, backend: Backend, gate: QueueGate) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(SnapshotCollector(backend, gate))
        self.responses = Counter(
            f"{PREFIX}http_responses", "HTTP responses by status", ["status"], registry=self.registry
        )
        self.replies = Counter(
            f"{PREFIX}replies", "Replies by how they ended", ["finish_reason"], registry=self.registry
        )
        self.prompt_tokens = Counter(f"{PREFIX}prompt_tokens", "Prompt tokens of jobs", registry=self.registry)
        self.first_token = Histogram(
            f"{PREFIX}time_to_first_token_seconds",
            "From a request's tokens to its first new one",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            f"{PREFIX}request_seconds", "From a request's tokens to its end", buckets=_SECONDS, registry=self.registry
        )

    def note(self, job: Job) -> None:
        """Count a job that has ended."""
        times = job.times
        self.prompt_tokens.inc(sum(len(prompt.token_ids) for prompt in job.prompts))
        for choice in job.choices:
            self.replies.labels(choice.reply.finish_reason or "cut").inc()
        if times.first_token is not None:
            self.first_token.observe(times.first_token - times.started)
        if times.ended is not None:
            self.duration.observe(times.ended - times.started)


def _cache_metrics(cache: CacheSnapshot) -> Iterable[Metric]:
    for entry in fields(CacheCounters):
        value = getattr(cache.counters, entry.name)
        if isinstance(value, int):
            yield _counter(entry.name, f"CacheCounters.{entry.name}", value)
    reasons = CounterMetricFamily(
        f"{PREFIX}requests_without_hit", "Requests that skipped nothing of their prompt", labels=["reason"]
    )
    for reason, count in sorted(cache.counters.requests_without_hit.items()):
        reasons.add_metric([reason], count)
    yield reasons
    for name, label, counts in (("state_slots", "owner", cache.state_slots), ("kv_blocks", "kind", cache.kv_blocks)):
        family = GaugeMetricFamily(f"{PREFIX}{name}", f"CacheSnapshot.{name}", labels=[label])
        for kind, count in counts.items():
            family.add_metric([kind], count)
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}{name}", text, value=value)
