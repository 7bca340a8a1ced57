"""Record seeded workloads step by step, to compare two versions of the package.

A redesign that changes no behaviour changes no line. Run it in both checkouts on one machine:

    python -m tests.mcore.recorded_workloads --output before.jsonl
    python -m tests.mcore.recorded_workloads --output after.jsonl --compare before.jsonl

Each line is a workload: a digest of the requests, pools and counters after each step, whether the next step was
launched early, and the tokens. Workloads have drafts, CUDA graphs (their stand-ins where CUDA is absent), pauses,
evictions, flushes, suspends, cancelled requests and failing steps.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from tests.mcore.engine_runs import MAX_STEPS, EngineRun
from tests.mcore.random_workloads import FLAVOURS, Workload, add_due, disturbed_step, make_workload
from tests.mcore.split_replays import capture_in_parts
from tests.mcore.workload_drafters import make_drafter

VARIANTS = {
    "plain": {},
    "drafts": {"num_drafts": 4},
    "graphs": {"has_graphs": True},
    "graphs, drafts": {"has_graphs": True, "num_drafts": 3},
    "graphs, disturbed": {"has_graphs": True, "disturbed_share": 0.1, "cancelled_share": 0.1},
}


def record(seed: int) -> dict[str, Any]:
    """Run the workload of a seed; flavours and variants alternate."""
    flavour = FLAVOURS[sorted(FLAVOURS)[seed % len(FLAVOURS)]]
    name = list(VARIANTS)[seed // len(FLAVOURS) % len(VARIANTS)]
    options = dict(VARIANTS[name])
    num_drafts, has_graphs = options.pop("num_drafts", 0), options.pop("has_graphs", False)
    cancelled_share = options.pop("cancelled_share", 0.0)
    work = make_workload(flavour, 5000 + seed, num_drafts)
    work = replace(work, disturbed_share=options.get("disturbed_share", work.disturbed_share))
    rng = random.Random(f"record {seed}")
    drafter = make_drafter(rng, work) if num_drafts else None
    with pytest.MonkeyPatch.context() as patch:
        if has_graphs:
            capture_in_parts(patch)
            prefill_tokens = min(24, work.config.max_tokens)
            config = replace(work.config, num_cuda_graphs=3, cuda_graph_prefill_tokens=prefill_tokens)
            work = replace(work, config=config)
        run = EngineRun.start(work.subject, work.config, drafter=drafter)
        steps = list(_steps(work, run, rng, cancelled_share))
    early = "".join("e" if is_early else "." for is_early, _ in steps)
    tokens = {request_id: run.tokens(request_id) for request_id in sorted(run.finished)}
    return {
        "seed": seed,
        "flavour": flavour.name,
        "variant": name,
        "steps": [digest for _, digest in steps],
        "early": early,
        "tokens": {str(request_id): found for request_id, found in tokens.items()},
        "counters": asdict(run.counters),
    }


def _steps(work: Workload, run: EngineRun, rng: random.Random, cancelled_share: float) -> Iterator[tuple[bool, str]]:
    """Run to the end; yield, after each step, True if the next one is launched, and a digest of everything."""
    pending, seen = dict(enumerate(work.arrivals)), Counter[str]()
    while pending or run.engine.has_unfinished_requests():
        assert run.num_steps < MAX_STEPS, run.context.snapshot()
        add_due(work, run, pending)
        if run.engine.requests and rng.random() < cancelled_share:
            run.engine.cancel_request(rng.choice(sorted(run.engine.requests)))
        if rng.random() < work.disturbed_share:
            disturbed_step(rng, run, seen, work.error_points(rng), work.disturbances)
        else:
            run.step()
        there = {None, *pending, *run.engine.requests, *run.finished}
        pending = {i: arrival for i, arrival in pending.items() if arrival.follows in there}  # else it was cancelled
        yield is_early(run), _digest(run)
    run.assert_matches_oracle(request_id for request_id in run.finished if not run.finished[request_id].failed())


def is_early(run: EngineRun) -> bool:
    """Return True if the next step is launched already."""
    return run.context.overlapped_step is not None


def _digest(run: EngineRun) -> str:
    cache, counters = run.context.cache, asdict(run.context.counters)
    requests = [
        (
            request.request_id,
            request.age,
            request.computed,
            request.scheduled,
            request.is_paused,
            request.cursor.accepted,
            request.cursor.live_slot,
            tuple(request.cursor.draft_slots),
            tuple(request.block_ids),
            request.num_published_blocks,
            request.checkpoint,
            tuple(request.generated),
        )
        for request in run.context.running_requests
    ]
    pools = cache.kv.num_evicted, cache.slots.num_evicted, cache.kv.num_available, cache.slots.count_by_owner()
    waiting = list(run.engine.waiting_request_ids)
    text = repr((requests, pools, sorted(counters.items()), waiting, cache.epoch))
    return blake2b(text.encode(), digest_size=8).hexdigest()


def main() -> int:
    """Write one line per workload; with `--compare`, report different lines and exit with status 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workloads", type=int, default=400)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--compare", type=Path, help="a file that another version wrote")
    arguments = parser.parse_args()
    totals = Counter[str]()
    with arguments.output.open("w") as output:
        for seed in range(arguments.num_workloads):
            line = record(seed)
            output.write(json.dumps(line) + "\n")
            output.flush()
            totals.update(workloads=1, steps=len(line["steps"]), overlapped_steps=line["early"].count("e"))
            totals.update({name: n for name, n in line["counters"].items() if isinstance(n, int)})
    print(dict(totals))
    if arguments.compare is None:
        return 0
    before, after = (path.read_text().splitlines() for path in (arguments.compare, arguments.output))
    differing = [json.loads(b)["seed"] for b, a in zip(before, after, strict=True) if b != a]
    print(f"{len(after) - len(differing)} of {len(after)} workloads are the same; differing seeds: {differing}")
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
