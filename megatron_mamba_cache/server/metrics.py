"""Metrics for the engines and the server, exported to Prometheus and shown on the dashboard."""

import math
from collections import Counter as Tally
from collections.abc import Iterable, Sequence
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..metrics import CacheCounters, CacheSnapshot
from .backend import Backend
from .exchange import Exchange
from .job import Job
from .job_progress import TokenTimes
from .limits import QueueGate

PREFIX = "mamba_cache_"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)

_RATIO = 1.05  # upper bound of a histogram bucket divided by its lower bound
_LEAST = 1e-6

COUNTER_TEXTS = {
    "requests_admitted": "Admissions of requests to the running batch, including those after an eviction",
    "prompt_tokens_matched": "Prompt tokens whose KV was cached, with or without a state to resume from",
    "prompt_tokens_skipped": "Prompt tokens that needed no prefill because a cached state was restored",
    "prefill_tokens_computed": "Prompt tokens that were prefilled, including those prefilled again after an eviction",
    "decode_tokens_computed": "Tokens processed by decode steps, including draft tokens",
    "decode_rows": "Requests in decode steps, summed over all steps",
    "draft_tokens": "Draft tokens verified",
    "accepted_tokens": "Draft tokens accepted",
    "unlisted_tokens": "Draft tokens rejected for a token that is not in the short list of the MTP drafter",
    "drafting_failures": "Steps that ran without drafts because the drafter failed",
    "states_reserved": "State slots reserved before a step for the state at a block boundary",
    "states_published": "States of prompts and replies added to the cache",
    "decode_states_published": "States at a block boundary inside a reply that were added to the cache",
    "states_restored": "Cached states from which a request resumed",
    "states_skipped_no_room": "States that were not cached because no slot was free and no entry had a lower priority",
    "admissions_deferred": "Steps that requests waited for a prefix that another request was prefilling",
    "requests_paused": "Pauses of running requests because no KV block was free",
    "requests_evicted": "Evictions of running requests, which must be prefilled again",
    "prompt_tokens_from_host": "Prompt tokens that needed no prefill because a prefix was restored from host memory",
    "states_written_to_host": "States offloaded to host memory, each with the KV before it",
    "states_restored_from_host": "States restored from host memory for a queued request",
    "states_not_written_no_room": "States not offloaded because host memory was full",
    "host_writes_failed": "Copies to host memory that failed, or were no longer needed when they ended",
    "host_restores_failed": "Copies from host memory that failed, or were no longer needed when they ended",
    "prompt_tokens_from_disk": "Prompt tokens that needed no prefill because a prefix was restored from disk",
    "states_written_to_disk": "States written to disk, each with the KV before it",
    "states_read_from_disk": "States read from disk for a queued request",
    "disk_writes_failed": "Files that could not be written, or were no longer needed when written",
    "disk_reads_failed": "Files that could not be read, or whose content had changed",
    "states_evicted": "Cached states evicted",
    "kv_blocks_evicted": "Cached KV blocks evicted",
    "steps": "Steps of the engine",
    "graph_steps": "Steps of the engine that replayed a CUDA graph",
    "steps_aborted": "Steps of the engine that failed; their requests are retried",
}

_STATE_SLOTS = (
    "Slots of the state pool by owner: free (for cached states), live (of a running request), reserved (for a boundary "
    "of this step), cached, draft (of a draft window)"
)
_KV_BLOCKS = "KV blocks by kind: free, in_use (by a running request), cached (used by no running request)"
_CACHE_BYTES = (
    "Bytes of the budget for KV blocks and states on one rank, by use: kv_in_use and states_running (by running "
    "requests; if cached states are quantized, all memory reserved for live ones), kv_cached and states_cached, rings "
    "(of replayed states), unusable (bytes of slabs in which neither fits), free"
)
_HOST_BYTES = (
    "Bytes of the host tier on one rank, by use: kv_cached and states_cached, kv_in_use (read or written by copies), "
    "states_reserved (for copies in progress), free; no values without a host tier"
)
_DISK_BYTES = "Bytes of the entries in the disk tier of one rank; no values without a disk tier"
_TIER_COPIES = "Copies between tiers in progress, by destination tier"


class Durations:
    """Histogram of durations; quantiles have a relative error of at most 5%."""

    def __init__(self) -> None:
        self._counts: Tally[int] = Tally()

    @staticmethod
    def together(parts: Iterable["Durations"]) -> "Durations":
        """Merge several histograms into one."""
        whole = Durations()
        for part in parts:
            whole._counts.update(part._counts)
        return whole

    def add(self, seconds: float, times: int = 1) -> None:
        """Add a duration of `seconds` to the histogram, `times` times."""
        self._counts[math.ceil(math.log(max(seconds, _LEAST), _RATIO))] += times

    def quantile(self, share: float) -> float | None:
        """Return the quantile for `share` (0 to 1), in seconds; None if the histogram is empty."""
        rank = math.ceil(share * self._counts.total())
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return float(_RATIO ** (bucket - 0.5))
        return None


class SnapshotCollector(Collector):
    """Prometheus collector that reads the backend's latest state on each scrape."""

    def __init__(self, backend: Backend, gate: QueueGate) -> None:
        self._backend = backend
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        """Yield metrics for the queue, the generated tokens and, once the engine reports it, the cache."""
        state = self._backend.state
        yield _gauge("ready", "1 if the engine is warmed up and has not failed", state.is_ready and not state.failure)
        yield _gauge("requests_running", "Requests running in the engine", state.num_running)
        yield _gauge("requests_waiting", "Requests waiting for the engine", state.num_waiting)
        yield _gauge("requests_inside", "Requests running, waiting or being prepared", self._gate.num_inside)
        yield _counter("requests_refused", "Requests refused because the queue was full", self._gate.num_refused)
        yield _counter("generated_tokens", "Tokens generated for all requests", state.generated_tokens)
        if state.cache is not None:
            yield from _cache_metrics(state.cache)


class ServerMetrics(TokenTimes):
    """Prometheus registry of a server, and the counters and histograms that the server updates."""

    def __init__(self, backend: Backend, gate: QueueGate, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(SnapshotCollector(backend, gate))
        ProcessCollector(registry=self.registry)
        Info(f"{PREFIX}model", "The served model", registry=self.registry).info({"model": model_name})
        self.responses = self._counter(
            "http_responses",
            "HTTP responses by status, except those to probes; 499: the client left before the last byte",
            ["status"],
        )
        self.probe_responses = self._counter(
            "probe_responses", "HTTP responses to health checks, scrapes and the polling dashboard", ["path", "status"]
        )
        self.replies = self._counter(
            "replies", "Replies by finish reason; cut: ended by an error or because the client left", ["finish_reason"]
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the requests submitted to the engine")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Time from a request's submission to the engine to its first token", _SECONDS
        )
        self.duration = self._histogram(
            "request_seconds", "Time from a request's submission to the engine to the end of its replies", _SECONDS
        )
        self.queueing = self._histogram(
            "queue_seconds", "Time from a request's arrival, before tokenization, to its first step", _SECONDS
        )
        self.inter_token = self._histogram(
            "inter_token_seconds", "Time between consecutive tokens of a reply", _GAP_SECONDS
        )
        self.recent_first_token, self.recent_inter_token = Durations(), Durations()

    def note(self, job: Job) -> None:
        """Record the prompt tokens, finish reasons and duration of a job that has ended."""
        self.prompt_tokens.inc(sum(len(prompt.token_ids) for prompt in job.prompts))
        for choice in job.choices:
            self.replies.labels(choice.reply.finish_reason or "cut").inc()
        if job.times.ended is not None:
            self.duration.observe(job.times.ended - job.times.started)

    def note_queued(self, seconds: float) -> None:
        self.queueing.observe(seconds)

    def note_exchange(self, exchange: Exchange) -> None:
        """Count an HTTP request that has ended, by response status."""
        if exchange.is_probe:
            self.probe_responses.labels(exchange.path, str(exchange.status)).inc()
        else:
            self.responses.labels(str(exchange.status)).inc()

    def note_first_token(self, seconds: float) -> None:
        self.first_token.observe(seconds)
        self.recent_first_token.add(seconds)

    def note_gap(self, seconds: float, num_tokens: int) -> None:
        """Record the time between tokens; tokens from the same step share it equally."""
        for _ in range(num_tokens):
            self.inter_token.observe(seconds / num_tokens)
        self.recent_inter_token.add(seconds / num_tokens, num_tokens)

    def num_responses(self) -> dict[str, int]:
        """Return the number of responses for each HTTP status, without probes."""
        samples = [sample for metric in self.responses.collect() for sample in metric.samples]
        return {one.labels["status"]: int(one.value) for one in samples if one.name.endswith("_total")}

    def take_recent(self) -> tuple[Durations, Durations]:
        """Return the histograms of times to first token and of times between tokens, both since the previous call."""
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
            yield _counter(entry.name, COUNTER_TEXTS[entry.name], value)
    reasons = CounterMetricFamily(
        f"{PREFIX}requests_without_hit", "Requests without a prefix hit, by reason", labels=["reason"]
    )
    for reason, count in sorted(cache.counters.requests_without_hit.items()):
        reasons.add_metric([reason], count)
    yield reasons
    for name, label, text, counts in (
        ("state_slots", "owner", _STATE_SLOTS, cache.state_slots),
        ("kv_blocks", "kind", _KV_BLOCKS, cache.kv_blocks),
        ("cache_bytes", "use", _CACHE_BYTES, cache.cache_bytes),
        ("host_bytes", "use", _HOST_BYTES, cache.host_bytes),
        ("disk_bytes", "use", _DISK_BYTES, cache.disk_bytes),
        ("tier_copies", "to", _TIER_COPIES, cache.tier_copies),
    ):
        family = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=[label])
        for kind, count in counts.items():
            family.add_metric([kind], count)
        yield family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}{name}", text, value=value)
