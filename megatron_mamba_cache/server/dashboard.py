"""Dashboard: a self-contained HTML page, and samples of the load in the last hour."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import HTMLResponse, JSONResponse

from ..metrics import CacheCounters
from .backend import Backend
from .limits import QueueGate
from .metrics import Durations, ServerMetrics

_PAGE = Path(__file__).with_name("dashboard.html")
INTERVAL_S = 5.0
_NUM_SAMPLES = 720
_NUM_RECENT = 12  # number of samples in the last minute
_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

_STATUSES = {
    "refused": {429},
    "client_errors": {*range(400, 499)} - {429},
    "left": {499},
    "server_errors": {*range(500, 600)},
}


@dataclass(frozen=True, slots=True)
class Sample:
    """Load at the end of one sampling interval, and counts for the interval."""

    time: float  # end of the interval, in seconds since the epoch
    seconds: float
    running: int
    waiting: int
    inside: int
    generated_tokens: int
    prompt_tokens_skipped: int
    prompt_tokens_from_host: int
    prompt_tokens_from_disk: int
    prompt_tokens_computed: int
    first_token_p50: float | None  # this and the next five fields are in seconds; None without tokens
    first_token_p95: float | None
    first_token_p99: float | None
    inter_token_p50: float | None
    inter_token_p95: float | None
    inter_token_p99: float | None
    refused: int  # number of responses with status 429
    client_errors: int  # number of responses with status 400 to 498, except 429
    left: int  # number of responses with status 499: the client disconnected
    server_errors: int


class History:
    """Load samples of the last hour in a ring buffer, with latency quantiles of the last minute."""

    def __init__(
        self, backend: Backend, gate: QueueGate, metrics: ServerMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._gate = gate
        self._metrics = metrics
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=_NUM_SAMPLES)
        self._recent: deque[tuple[Durations, Durations]] = deque(maxlen=_NUM_RECENT)
        self._sampled = clock()
        self._totals: Mapping[str, int] = self._now()

    async def keep(self) -> None:
        """Take a sample every `INTERVAL_S` seconds until the task is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(INTERVAL_S)

    def sample(self) -> None:
        """Append a sample for the interval since the last sample."""
        now, totals = self._clock(), self._now()
        first_token, inter_token = self._metrics.take_recent()
        self._recent.append((first_token, inter_token))
        state = self._backend.state
        values: dict[str, Any] = {
            **{f"first_token_{name}": value for name, value in quantiles(first_token).items()},
            **{f"inter_token_{name}": value for name, value in quantiles(inter_token).items()},
            **{name: max(total - self._totals.get(name, 0), 0) for name, total in totals.items()},
        }
        self._samples.append(
            Sample(
                time=round(time.time(), 3),
                seconds=round(now - self._sampled, 3),
                running=state.num_running,
                waiting=state.num_waiting,
                inside=self._gate.num_inside,
                **values,
            )
        )
        self._sampled, self._totals = now, totals

    def body(self, after: float = -math.inf) -> dict[str, Any]:
        """Return a JSON object with the samples newer than `after` (epoch seconds) and the last minute's quantiles."""
        first_token = Durations.together([*(one for one, _ in self._recent), self._metrics.recent_first_token])
        inter_token = Durations.together([*(one for _, one in self._recent), self._metrics.recent_inter_token])
        names = [entry.name for entry in fields(Sample)]
        return {
            "interval_seconds": INTERVAL_S,
            "num_samples_kept": _NUM_SAMPLES,
            "fields": names,
            "samples": [[getattr(one, name) for name in names] for one in self._samples if one.time > after],
            "last_minute": {"first_token": quantiles(first_token), "inter_token": quantiles(inter_token)},
        }

    def _now(self) -> dict[str, int]:
        """Return the counters since the server's start; a sample stores their increase between two calls."""
        state = self._backend.state
        counters = CacheCounters() if state.cache is None else state.cache.counters
        responses = self._metrics.num_responses()
        return {
            "generated_tokens": state.generated_tokens,
            "prompt_tokens_skipped": counters.prompt_tokens_skipped,
            "prompt_tokens_from_host": counters.prompt_tokens_from_host,
            "prompt_tokens_from_disk": counters.prompt_tokens_from_disk,
            "prompt_tokens_computed": counters.prefill_tokens_computed,
            **{
                kind: sum(count for status, count in responses.items() if int(status) in statuses)
                for kind, statuses in _STATUSES.items()
            },
        }


def dashboard_routes(history: History, model_name: str) -> APIRouter:
    """Return the routes below `/dashboard`."""
    router = APIRouter(prefix="/dashboard")

    @router.get("", response_class=HTMLResponse)
    async def dashboard() -> HTMLResponse:
        return HTMLResponse(_PAGE.read_text(encoding="utf-8"), headers={"Cache-Control": "no-store"})

    @router.get("/history", include_in_schema=False)
    async def past(after: float = -math.inf) -> JSONResponse:
        body = {"model": model_name, **history.body(after)}
        return JSONResponse(body, headers={"Cache-Control": "no-store"})

    return router


def quantiles(durations: Durations) -> dict[str, float | None]:
    """Return the quantiles p50, p95 and p99 of `durations`, in seconds; all are None if `durations` is empty."""
    return {
        name: None if (value := durations.quantile(share)) is None else float(f"{value:.3g}")
        for name, share in _SHARES.items()
    }
