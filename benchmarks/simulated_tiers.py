"""Simulate the gain of a host tier for many concurrent sessions.

    PYTHONPATH=. python benchmarks/simulated_tiers.py --trace FILE ... [--sessions N] [--models NAME ...]

The benchmark needs neither a model nor a GPU: requests use the real scheduler, cache and tiers
(`loads/simulated_server.py`). GB means 10^9 bytes. The simulation uses these times and limits for all models:

- Decode steps take as long as was measured for Nemotron 3 Nano on an H200: 2.75, 6.5, 15.6 and 20.7 ms for 1, 8, 64 and
  256 requests, interpolated linearly. Prompts add 1 s per 74,500 tokens. A step has at most 8,192 tokens.
- Copies between the GPU and the host take 1 s per 55 GB, or 1 s per 100 GB in total while data is copied in both
  directions. Copies to the host pause for half of the time.
- Up to 256 requests run concurrently, but only as many as fit in half of the GPU memory if each has a state and 2,048
  tokens. These are the defaults of `serve`, without memory for rings.

In recorded sessions, an agent sends its next request only after the reply: the time from the end of a request to the
arrival of the next one equals the recorded time between their arrivals. If more sessions run than were recorded, the
first sessions are repeated with different texts. Mooncake requests arrive at their recorded times. With `--replies
left-out`, later prompts contain other tokens instead of the replies, as if reasoning were removed from the history.

The caches are GPU memory alone, GPU memory with a number of GB of host memory, and an unlimited GPU that evicts
nothing. The columns are:

- skipped: fraction of the prompt tokens that need no prefill; of unlimited: this fraction relative to an unlimited
  cache;
- mean, p50, p99: time to first token in seconds; of card: the mean relative to the mean with GPU memory alone;
- to host, back: GB copied in each direction;
- failed: copies to the host that failed because the state was evicted first; no room: writes for which the host had no
  room;
- restores: number of states that were restored from the host; waited: number of restores that delayed a request, and
  the mean delay, including the rest of the current step.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from loads.concurrent_sessions import with_repeats, without_replies
from loads.simulated_server import ServedRequest, ServerSettings, SimulatedServer, TimedRequest, closed_loop, open_loop
from loads.sized_cache import BLOCK_SIZE, MODELS, ModelSizes
from loads.timed_copies import Clock, CopyRates, TimedCopies
from measuring.load_reports import append, command, document

from megatron_mamba_cache.planning.caches import CacheSizes, empty_cache, tiered_cache
from megatron_mamba_cache.planning.plan import unlimited_space
from megatron_mamba_cache.planning.recorded_load import read_load
from megatron_mamba_cache.policy.tiers.copies import CopyTimes, Lane

SCRIPT = "benchmarks/simulated_tiers.py"
GB = 10**9
RATES = CopyRates(alone=55e9, both=100e9, writing=0.5)
DECODING_REQUESTS = (1, 8, 64, 256)
DECODE_STEPS_S = (0.00275, 0.0065, 0.0156, 0.0207)
PROMPT_TOKEN_S = 1 / 74_500
MAX_TOKENS = 8192
MOST_REQUESTS = 256
TOKENS_A_REQUEST = 2048


@dataclass(frozen=True, slots=True)
class Case:
    """A load, the sizes of a model, and a cache.

    Args:
        sessions: Number of concurrent sessions.
        cache_gb: GB of GPU memory for the cache.
        host_gb: GB of host memory; 0: no host tier.
        is_unlimited: If True, the GPU evicts nothing, whatever its size.
        repeats_replies: If True, prompts contain the preceding replies.
    """

    trace: Path
    sessions: int
    model: str
    cache_gb: float
    host_gb: float = 0.0
    is_unlimited: bool = False
    repeats_replies: bool = True

    @property
    def cache(self) -> str:
        """Name of the cache in a table."""
        if self.is_unlimited:
            return "unlimited"
        return f"{self.cache_gb:g}" + (f" + {self.host_gb:g}" if self.host_gb else "")


@dataclass(frozen=True, slots=True)
class Figure:
    """Results of a case: sizes in GB, times in seconds.

    Args:
        hours: Simulated hours until the end of the last request.
        preempted: Number of running requests that were preempted and queued again.
    """

    load: str
    model: str
    cache: str
    requests: int
    hours: float
    share: float
    mean: float
    p50: float
    p99: float
    to_host: float
    back: float
    writes: int
    writes_failed: int
    writes_no_room: int
    restores: int
    restores_waited_for: int
    mean_wait: float
    preempted: int


def main() -> None:
    """Simulate, then print the results as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace", type=Path, nargs="+", required=True, help="recorded load; see planning/recorded_load.py"
    )
    parser.add_argument(
        "--sessions", type=int, default=128, help="number of concurrent sessions of agents; default: %(default)s"
    )
    parser.add_argument("--replies", choices=["repeated", "left-out"], default="repeated", help="default: %(default)s")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["nano"], help="model sizes; default: nano")
    parser.add_argument("--cache-gb", type=float, default=40, help="GB of GPU memory; default: %(default)s")
    parser.add_argument("--host-cache-gb", type=float, nargs="+", default=[200], help="GB of host memory; default: 200")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--append", type=Path, help="also append the table to this file")
    arguments = parser.parse_args()
    cases = []
    for trace, model in product(arguments.trace, arguments.models):
        repeats_replies = arguments.replies == "repeated"
        card = Case(trace, arguments.sessions, model, arguments.cache_gb, repeats_replies=repeats_replies)
        tiered = [replace(card, host_gb=host_gb) for host_gb in arguments.host_cache_gb]
        cases += [card, *tiered, replace(card, is_unlimited=True)]
    with ProcessPoolExecutor(arguments.processes) as processes:
        figures = list(processes.map(simulate, cases))
    text = table(figures, command(SCRIPT, sys.argv[1:]))
    if arguments.append:
        append(text, arguments.append, "Host tier in a simulated server", __doc__)
    print(json.dumps(document([asdict(figure) for figure in figures]), indent=2) if arguments.json else text)


def simulate(case: Case) -> Figure:
    """Serve the load of a case and return the results."""
    requests, model = load_of(case.trace, case.sessions, case.repeats_replies), MODELS[case.model]
    sizes = CacheSizes(model.token_bytes, model.state_bytes, BLOCK_SIZE)
    clock, settings = Clock(), settings_of(model, case.cache_gb)
    copies, tier = TimedCopies(clock, sizes.unit, RATES), None
    if case.is_unlimited:
        texts = [request.text for request in requests]
        space = unlimited_space(texts, BLOCK_SIZE, settings.max_requests)
        prefixes = empty_cache(space, sizes, max_requests=settings.max_requests)
    elif case.host_gb:
        spaces = [model.slabs(int(size * GB)) for size in (case.cache_gb, case.host_gb)]
        tiered = tiered_cache(*spaces, sizes, copies, copy_times(sizes), settings.max_requests)
        prefixes, tier = tiered.cache, tiered.tier
    else:
        prefixes = empty_cache(model.slabs(int(case.cache_gb * GB)), sizes, max_requests=settings.max_requests)
    server = SimulatedServer(requests, prefixes, settings, clock, copies, tier)
    served = server.run()
    first = np.array([request.time_to_first_token for request in served])
    waits = [request.copy_wait_s for request in served if request.copy_wait_s > 0]
    return Figure(
        load=case.trace.name,
        model=case.model,
        cache=case.cache,
        requests=len(served),
        hours=clock.now / 3600,
        share=share_of(served),
        mean=float(first.mean()),
        p50=float(np.percentile(first, 50)),
        p99=float(np.percentile(first, 99)),
        to_host=copies.num_bytes[Lane.TO_HOST] / GB,
        back=copies.num_bytes[Lane.TO_DEVICE] / GB,
        writes=prefixes.counters.states_written_to_host,
        writes_failed=prefixes.counters.host_writes_failed,
        writes_no_room=prefixes.counters.states_not_written_no_room,
        restores=prefixes.counters.states_restored_from_host,
        restores_waited_for=len(waits),
        mean_wait=float(np.mean(waits)) if waits else 0.0,
        preempted=server.num_preempted,
    )


@cache
def load_of(trace: Path, num_sessions: int, repeats_replies: bool) -> list[TimedRequest]:
    """Return the requests of a file: in a closed loop if the file has sessions, otherwise at their recorded times."""
    load = read_load(trace)
    if len({request.session for request in load.requests}) == len(load.requests):
        requests = open_loop(load, BLOCK_SIZE)
    else:
        requests = closed_loop(with_repeats(load, num_sessions), BLOCK_SIZE)
    if repeats_replies:
        return requests
    texts = without_replies([request.text for request in requests], BLOCK_SIZE)
    return [replace(request, text=text) for request, text in zip(requests, texts, strict=True)]


def settings_of(model: ModelSizes, cache_gb: float) -> ServerSettings:
    """Return the default limits of `serve` for a model on a GPU with `cache_gb` GB for its cache."""
    request_bytes = model.state_bytes + TOKENS_A_REQUEST * model.token_bytes
    fitting = min(MOST_REQUESTS, cache_gb * GB / 2 // request_bytes)
    return ServerSettings(max(int(fitting), 1), MAX_TOKENS, DECODING_REQUESTS, DECODE_STEPS_S, PROMPT_TOKEN_S)


def copy_times(sizes: CacheSizes) -> CopyTimes:
    """Return the copy and compute times that a real engine measures at its start, in nanoseconds."""
    block, state = (round(num_bytes / RATES.alone * 1e9) for num_bytes in (sizes.unit.block, sizes.unit.state))
    return CopyTimes(block, state, round(PROMPT_TOKEN_S * 1e9))


def share_of(served: Sequence[ServedRequest]) -> float:
    """Return the fraction of the prompt tokens that needed no prefill."""
    return sum(request.skipped for request in served) / sum(request.prompt_len for request in served)


def table(figures: Sequence[Figure], made_by: str) -> str:
    """Return the results as Markdown tables, one per load."""
    columns = ["model", "GB", "skipped", "of unlimited", "mean", "of card", "p50", "p99", "to host", "back", "failed"]
    columns += ["no room", "restores", "waited"]
    lines = []
    for load in dict.fromkeys(figure.load for figure in figures):
        found = [figure for figure in figures if figure.load == load]
        versions = f"Python {platform.python_version()}; {found[0].requests:,} requests."
        lines += [f"## {load}", "", f"    {made_by}", "", versions, ""]
        lines += [f"| {' | '.join(columns)} |", "|---|---|" + "---:|" * (len(columns) - 2)]
        by_cache = {(figure.model, figure.cache): figure for figure in found}
        lines += [_row(figure, by_cache) for figure in found]
        lines += [""]
    return "\n".join(lines)


def _row(figure: Figure, by_cache: Mapping[tuple[str, str], Figure]) -> str:
    """Return a line of the table.

    Args:
        by_cache: All results of the load, by model and cache; the first cache of each model is GPU memory alone.
    """
    unlimited = by_cache[figure.model, "unlimited"]
    card = next(other for other in by_cache.values() if other.model == figure.model)
    cells = [figure.model, figure.cache, f"{figure.share:.4f}", f"{figure.share / unlimited.share:.4f}"]
    cells += [f"{figure.mean:.3f}", f"{figure.mean / card.mean:.2f}", f"{figure.p50:.3f}", f"{figure.p99:.2f}"]
    if figure.writes + figure.writes_failed:
        failed = f"{figure.writes_failed:,} of {figure.writes + figure.writes_failed:,}"
        waited = f"{figure.restores_waited_for:,}, {1000 * figure.mean_wait:.1f} ms"
        cells += [f"{figure.to_host:,.0f}", f"{figure.back:,.0f}", failed, f"{figure.writes_no_room:,}"]
        cells += [f"{figure.restores:,}", waited]
    else:
        cells += ["-"] * 6
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
