"""Simulate the gain of a host tier for many concurrent sessions.

    PYTHONPATH=. python benchmarks/simulated_tiers.py --trace FILE ... [--sessions N] [--models NAME ...]

No model and no GPU: requests go through the real scheduler, cache and tiers (`loads/simulated_server.py`). Sizes are in
GB of 10^9 bytes. Steps take the times that were measured for Nemotron 3 Nano on an H200, whatever the model's sizes:
2.75, 6.5, 15.6 and 20.7 ms where 1, 8, 64 and 256 requests decode, straight lines in between, and 1 s more for each
74,500 prompt tokens. Copies between the card and the host take 1 s for each 55 GB, and 100 GB while both ways copy;
those to the host rest half of the time. A step has at most 8,192 tokens; as many requests run, up to 256, as have room
in half of the card's memory for a state and 2,048 tokens each: what `serve` takes, rings left out.

Sessions of an agent wait for their answers: a request comes as long after the end of the one before it as it was
recorded after that one came. Where there are more sessions than the file has, its first ones come again with texts of
their own. Requests of Mooncake's traces come when they were recorded. With `--replies left-out`, prompts have as many
other tokens instead of the replies before them, as where reasoning is left out.

The caches: the card's memory alone; with a number of GB of the host below it; and unlimited, a card that evicts
nothing. Columns:

- skipped: share of the prompt tokens; of unlimited: that divided by what an unlimited cache skips;
- mean, p50, p99: seconds from a request's arrival to its first token; of card: the mean divided by that of the card
  alone;
- to host, back: GB copied;
- failed: copies to the host that failed, here because their state was evicted meanwhile; no room: writes for which the
  host had none;
- restores: boundaries that came back; waited: how many of them a request was passed over for, and for how long, on
  average, the rest of a step included.
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
    """A load, a model's sizes, and a cache.

    Args:
        sessions: Of an agent, at once.
        cache_gb: Of the card.
        host_gb: Of the host; 0: none.
        is_unlimited: True if the card evicts nothing, whatever its size.
        repeats_replies: True if prompts repeat the replies before them.
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
        """The cache's name in a table."""
        if self.is_unlimited:
            return "unlimited"
        return f"{self.cache_gb:g}" + (f" + {self.host_gb:g}" if self.host_gb else "")


@dataclass(frozen=True, slots=True)
class Figure:
    """Results of a case: sizes in GB, times in seconds.

    Args:
        hours: Until the last request had ended.
        preempted: Requests that ran and were queued again for lack of room.
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
    """Simulate, then print the figures as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, nargs="+", required=True, help="see planning/recorded_load.py")
    parser.add_argument("--sessions", type=int, default=128, help="of an agent, at once; default: %(default)s")
    parser.add_argument("--replies", choices=["repeated", "left-out"], default="repeated", help="default: %(default)s")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["nano"], help="sizes; default: nano")
    parser.add_argument("--cache-gb", type=float, default=40, help="GB of the card; default: %(default)s")
    parser.add_argument("--host-cache-gb", type=float, nargs="+", default=[200], help="GB of the host; default: 200")
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
        append(text, arguments.append, "Simulated tiers", __doc__)
    print(json.dumps(document([asdict(figure) for figure in figures]), indent=2) if arguments.json else text)


def simulate(case: Case) -> Figure:
    """Serve a case's load."""
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
    """Return the requests of a file: in a closed loop if sessions are recorded."""
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
    """Return the defaults of `serve` for a model on a GPU with this much memory for its cache."""
    request_bytes = model.state_bytes + TOKENS_A_REQUEST * model.token_bytes
    fitting = min(MOST_REQUESTS, cache_gb * GB / 2 // request_bytes)
    return ServerSettings(max(int(fitting), 1), MAX_TOKENS, DECODING_REQUESTS, DECODE_STEPS_S, PROMPT_TOKEN_S)


def copy_times(sizes: CacheSizes) -> CopyTimes:
    """Return the times that an engine would agree on at its start, in nanoseconds."""
    block, state = (round(num_bytes / RATES.alone * 1e9) for num_bytes in (sizes.unit.block, sizes.unit.state))
    return CopyTimes(block, state, round(PROMPT_TOKEN_S * 1e9))


def share_of(served: Sequence[ServedRequest]) -> float:
    """Return the share of the prompt tokens that were skipped."""
    return sum(request.skipped for request in served) / sum(request.prompt_len for request in served)


def table(figures: Sequence[Figure], made_by: str) -> str:
    """Return the figures as Markdown, each load's under a heading."""
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
        by_cache: All figures of the load, by model and cache; those of a model begin with the card alone.
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
