"""Measure the host time and the Python calls of a decode step, and how often the device waits for the host.

    PYTHONPATH=. python3 benchmarks/host_work.py [--rows N ...] [--spread N] [--waiting N] [--drafter NAME]
        [--json FILE]

A tiny model decodes with captured steps that are never replayed, so only the host works. The script therefore runs on
any machine; the generated tokens are meaningless. Only steps count that overlap with both the preceding and the next
step, and in which no request ends: nearly all steps of a busy engine are of this kind. Calls include those of functions
in C. Times are medians over steps without the profiler. To compare two versions, alternate them, because the speed of a
machine changes by the minute.

"Overlapped" is the fraction of further steps of any kind that overlapped with the preceding step. In all other steps,
the device waits for the host. With `--spread`, prompts have different lengths, so that requests reach the ends of KV
blocks one by one, as under a real load. With `--waiting`, some requests wait in the queue until a running request ends.

With `--drafter mtp`, each request has NUM_DRAFTS drafts of a random MTP head in each step. With `--drafter auto`, the
engine also decides how many drafts each request has and which requests are looked up; all drafts of the head count as
accepted.
"""

import argparse
import cProfile
import json
import pstats
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from loads.known_head import random_head
from loads.serving_engine import MODES, SHAPES, config_of, model_of, send
from measuring.machine import describe_machine
from torch import Tensor
from turn_latency import some_tokens

from megatron_mamba_cache import build, build_engine
from megatron_mamba_cache.models.drafting import mtp_drafter
from megatron_mamba_cache.speculation.draft_policy import DraftPolicy
from megatron_mamba_cache.speculation.prompt_lookup import AutoDrafter
from megatron_mamba_cache.step import graphs
from megatron_mamba_cache.step.recorder import Compute, Prepare, Replay, nothing

ROWS = (1, 8, 64)
NUM_PROMPT = 70
NUM_REPLY = 900
NUM_PROFILED = 30
NUM_TIMED = 200
NUM_COUNTED = 256
NUM_DRAFTS = 3
NUM_DRAFTED_REPLY = 3000


@dataclass(frozen=True, slots=True)
class HostWork:
    """Host work in a decode step of some requests."""

    num_rows: int
    calls: float
    milliseconds: float
    overlapped: float  # share of steps


class LeavesReplaysOut:
    """Replacement for `CudaRecorder` that computes a recorded step once and does nothing in its replays."""

    def num_bytes(self) -> int:
        """Return 0: no graph takes memory."""
        return 0

    def split(self) -> None:
        """Do nothing."""

    def record(self, compute: Compute, prepare: Prepare = nothing) -> tuple[tuple[Tensor, ...], Replay]:
        """Return copies of the results, and a replay that only prepares the inputs on the host."""
        return tuple(result.clone() for result in compute()), Replay(nothing, prepare)


class RightPolicy(DraftPolicy):
    """Takes all drafts of the drafter for right."""

    def note(
        self,
        request_ids: Sequence[int],
        num_drafted: Sequence[int],
        num_accepted: Sequence[int],
        *,
        by_lookup: bool = False,
    ) -> None:
        """Record the outcomes of drafts."""
        super().note(request_ids, num_drafted, num_accepted if by_lookup else num_drafted, by_lookup=by_lookup)


class QuickDrafter(mtp_drafter.MTPDrafter):
    """A head whose passes seem to take hardly any time, so that drafts always pay."""

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return hardly any time."""
        return 1e-9


def host_work(model: Any, num_rows: int, spread: int = 0, num_waiting: int = 0, drafter: str = "none") -> HostWork:
    """Measure steps of `num_rows` requests, whose prompt lengths differ by up to `spread` tokens.

    Args:
        num_waiting: Number of requests that wait until a running request ends.
        drafter: "none", "mtp" or "auto".
    """
    room = {"max_requests": num_rows, "max_tokens": 4096, "state_gb": 0.1, "kv_gb": 0.1}
    shape = replace(SHAPES["tiny"], prefill_graph_tokens=0, **room)  # each capture computes its tokens
    shape = replace(shape, adaptive_drafts=drafter == "auto")
    config = replace(config_of(shape, MODES["full"]), num_cuda_graphs=1)
    head, rng = None, random.Random(num_rows)
    if drafter != "none":
        config = replace(config, num_speculative_tokens=NUM_DRAFTS)
        head = QuickDrafter(model, random_head(shape.fields, model.config.params_dtype))
    with (
        patch.object(graphs, "CudaRecorder", LeavesReplaysOut),
        patch.object(graphs, "device_reason", lambda memory: None),
        patch.object(mtp_drafter, "CudaRecorder", LeavesReplaysOut),
        patch.object(mtp_drafter, "device_reason", lambda memory: None),
        patch.object(build, "DraftPolicy", RightPolicy),
    ):
        engine = build_engine(model, config, drafter=AutoDrafter(head) if drafter == "auto" and head else head)
        num_reply = NUM_DRAFTED_REPLY if head else NUM_REPLY
        for index in range(num_rows + num_waiting):
            num_tokens = NUM_PROMPT + rng.randrange(spread + 1)
            send(engine, index, some_tokens(rng, shape, num_tokens), num_reply)
        while len(engine.waiting_request_ids) > num_waiting or not engine.context.is_decode_only():
            engine.step_modern()
    calls = [_num_calls(engine) for _ in range(NUM_PROFILED)]
    seconds = [_seconds(engine) for _ in range(NUM_TIMED)]
    overlapped = [_overlaps(engine) for _ in range(NUM_COUNTED)]
    engine.close()
    return HostWork(num_rows, median(calls), 1e3 * median(seconds), sum(overlapped) / NUM_COUNTED)


def _num_calls(engine: Any) -> int:
    """Run steps until two consecutive ones overlap; return the number of calls in the second."""
    while engine.has_unfinished_requests():
        profile, was_early = cProfile.Profile(), _is_ahead(engine)
        profile.enable()
        engine.step_modern()
        profile.disable()
        if was_early and _is_ahead(engine):
            return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    raise RuntimeError("no two consecutive steps overlapped; raise NUM_REPLY")


def _seconds(engine: Any) -> float:
    """Run steps until two consecutive ones overlap; return the seconds of the second."""
    while engine.has_unfinished_requests():
        was_early, began = _is_ahead(engine), time.perf_counter()
        engine.step_modern()
        seconds = time.perf_counter() - began
        if was_early and _is_ahead(engine):
            return seconds
    raise RuntimeError("no two consecutive steps overlapped; raise NUM_REPLY")


def _overlaps(engine: Any) -> bool:
    """Run a step; return True if it overlapped with the preceding step."""
    was_early = _is_ahead(engine)
    engine.step_modern()
    return was_early


def _is_ahead(engine: Any) -> bool:
    return engine.context.overlapped_step is not None


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument(
        "--spread", type=int, default=0, metavar="N", help="maximum difference of prompt lengths, in tokens"
    )
    parser.add_argument(
        "--waiting", type=int, default=0, metavar="N", help="requests that wait for a running request to end"
    )
    parser.add_argument("--drafter", choices=("none", "mtp", "auto"), default="none", help="default: none")
    parser.add_argument("--json", type=Path, help="also write the results to FILE")
    arguments = parser.parse_args()
    model = model_of(SHAPES["tiny"])
    load = arguments.spread, arguments.waiting, arguments.drafter
    found = [host_work(model, num_rows, *load) for num_rows in arguments.rows]
    print(describe_machine(), "\n\n| rows | calls a step | ms a step | overlapped, % |\n|---:|---:|---:|---:|")
    for work in found:
        print(f"| {work.num_rows} | {work.calls:.0f} | {work.milliseconds:.3f} | {100 * work.overlapped:.0f} |")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(work) for work in found]))


if __name__ == "__main__":
    main()
