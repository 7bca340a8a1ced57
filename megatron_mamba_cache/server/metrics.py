"""Metrics for Prometheus and the dashboard: the engine's latest snapshot and the front end's own counters."""

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

_RATIO = 1.05  # of a bucket's upper bound to its lower one
_LEAST = 1e-6

COUNTER_TEXTS = {
    "requests_admitted": "Times that a request was given a row of the batch, again after an eviction included",
    "prompt_tokens_matched": "Prompt tokens whose KV was found in the cache, with a state to resume from or not",
    "prompt_tokens_skipped": "Prompt tokens that were not computed because a cached state was restored",
    "prefill_tokens_computed": "Prompt tokens that were computed, those computed again after an eviction included",
    "decode_tokens_computed": "Tokens computed by decode steps, drafts included",
    "decode_rows": "Rows of all decode steps, one for each request and step",
    "draft_tokens": "Draft tokens that were verified",
    "accepted_tokens": "Draft tokens that were kept",
    "drafting_failures": "Steps that went on without drafts because the drafter failed",
    "states_reserved": "State slots that were reserved for a boundary before a step",
    "states_published": "States of prompts and replies that became findable in the cache",
    "decode_states_published": "Of the published states, those at a boundary inside a reply",
    "states_restored": "Cached states that a request resumed from",
    "states_skipped_no_room": "States that were not kept because no slot was free or worth evicting",
    "admissions_deferred": "Steps that requests waited for a prefix that another request was computing",
    "requests_paused": "Times that a running request was paused for want of KV blocks",
    "requests_evicted": "Times that a running request lost its memory and had to be computed again",
    "prompt_tokens_from_host": "Prompt tokens skipped because their prefix came back from the host's memory",
    "states_written_to_host": "States written to the host's memory, each with the KV before it",
    "states_restored_from_host": "States that came back from the host's memory, for a request that waited",
    "states_not_written_no_room": "States that were not written because the host's memory had no room",
    "host_writes_failed": "Copies to the host's memory that failed, or were of no use any more when they ended",
    "host_restores_failed": "Copies from the host's memory that failed, or were of no use any more when they ended",
    "prompt_tokens_from_disk": "Prompt tokens skipped because their prefix came back from the disk",
    "states_written_to_disk": "States written to the disk, each with the KV before it",
    "states_read_from_disk": "States read from the disk, for a request that waited",
    "disk_writes_failed": "Files that could not be written, or were of no use any more when they were",
    "disk_reads_failed": "Files that could not be read, or were not what had been written",
    "states_evicted": "Cached states that were evicted",
    "kv_blocks_evicted": "Cached KV blocks that were evicted",
    "steps": "Steps of the engine",
    "graph_steps": "Steps of the engine that replayed a CUDA graph",
    "steps_aborted": "Steps of the engine that failed; their requests are tried again",
}

_STATE_SLOTS = (
    "Slots of the state pool by owner: free (for cached states), live (of a running request), reserved (for a boundary "
    "of this step), cached (findable), draft (of a draft window)"
)
_KV_BLOCKS = "KV blocks by kind: free, in_use (of a running request), cached (findable, used by no running request)"
_CACHE_BYTES = (
    "Bytes of the memory for KV blocks and states by use, of one rank: kv_in_use and states_running (of running "
    "requests, and where cached states are quantized all that is set aside for live ones), kv_cached and states_cached "
    "(findable), rings (of replayed states), unusable (in slabs, where neither fits), free"
)
_HOST_BYTES = (
    "Bytes of the host tier by use, of one rank: kv_cached and states_cached (findable), kv_in_use (that copies read "
    "or write), states_reserved (for what is on its way there), free; nothing without a host tier"
)
_DISK_BYTES = "Bytes of the entries in the disk tier, of one rank; nothing without a disk tier"
_TIER_COPIES = "Copies between tiers that are under way, by the tier that they bring a state and its KV to"


class Durations:
    """A histogram whose buckets grow by five percent, which bounds its relative error."""

    def __init__(self) -> None:
        self._counts: Tally[int] = Tally()

    @staticmethod
    def together(parts: Iterable["Durations"]) -> "Durations":
        """Return the sum of several histograms."""
        whole = Durations()
        for part in parts:
            whole._counts.update(part._counts)
        return whole

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration."""
        self._counts[math.ceil(math.log(max(seconds, _LEAST), _RATIO))] += times

    def quantile(self, share: float) -> float | None:
        """Return the duration that `share` of all durations does not exceed; None if there are none."""
        rank = math.ceil(share * self._counts.total())
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return float(_RATIO ** (bucket - 0.5))
        return None


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


class ServerMetrics(TokenTimes):
    """A server's registry and its own counters."""

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
        self.queueing.observe(seconds)

    def note_exchange(self, exchange: Exchange) -> None:
        """Count a request that has ended, by its status."""
        if exchange.is_probe:
            self.probe_responses.labels(exchange.path, str(exchange.status)).inc()
        else:
            self.responses.labels(str(exchange.status)).inc()

    def note_first_token(self, seconds: float) -> None:
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
            yield _counter(entry.name, _counter_text(entry.name), value)
    reasons = CounterMetricFamily(
        f"{PREFIX}requests_without_hit", "Requests that skipped nothing of their prompt", labels=["reason"]
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


def _counter_text(name: str) -> str:
    """Return what a field of `CacheCounters` counts."""
    return COUNTER_TEXTS.get(name, name.replace("_", " ").capitalize())
