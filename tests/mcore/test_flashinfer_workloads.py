"""Random workloads with FlashInfer's attention, in CUDA graphs too.

With CUDA they are in half precision, each token is near the oracle's best, and FlashInfer is needed. Without, its
backend plans for a stand-in, in single precision: tokens are the oracle's. That plans of graphs have room enough is not
shown here, where they have too much.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.attention import flashinfer
from megatron_mamba_cache.kernels.attention.flashinfer_calls import CapturedPart, PagedAttention, PageLists
from megatron_mamba_cache.kernels.attention.interface import AttentionRows, PlannedAttention
from megatron_mamba_cache.kernels.attention.split_prompts import SplitPart
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.step.step_graph import StepGraph
from tests.kernels.attention_libraries import serve_with_flashinfer
from tests.mcore.graph_stand_ins import with_graphs
from tests.mcore.random_workloads import FLAVOURS, MODEL_FORMS, WorkloadOutcome, make_workload, run_workload
from tests.mcore.split_replays import capture_in_parts
from tests.mcore.workload_drafters import make_drafter
from tests.mcore.workload_totals import WorkloadTotals

HAS_CUDA = torch.cuda.is_available()
MOST_CHANGED = 0.1
"""The share of tokens in half precision that may differ from the oracle's choice."""
MOST_DRAFTS = 8
SHORT = range(8)  # one, unless it does not exercise all
BY_DEFAULT = ("roomy", "tight_blocks", "small_steps", "one_budget")
by_drafts = pytest.mark.parametrize("num_drafts", [0, MOST_DRAFTS], ids=["plain", "drafts"])


class Plans:
    """Counts plans of steps; with `last_block`, checks that "fa3" gets no later blocks.

    Attributes:
        num_eager, num_replayed: By kernel, outside of graphs and in them, without those of captures.
        num_far: Plans of prompts that have later blocks.
        num_left_out: Graphs that were not replayed as a step's prompts have such blocks.
    """

    def __init__(self) -> None:
        self.num_eager: Counter[str] = Counter()
        self.num_replayed: Counter[str] = Counter()
        self.last_block: int | None = None
        self.num_far = self.num_left_out = 0
        self._kernels: dict[int, str] = {}
        self._counts: Counter[str] = Counter()

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Start counting."""
        make, plan_pages, reads_blocks = flashinfer._wrapper, PagedAttention.plan_pages, StepGraph.reads_blocks_of
        plan, plan_again = flashinfer.FlashInferAttention.plan, CapturedPart.plan_again
        plan_pieces = SplitPart.plan_again

        def noted(workspace: Tensor, kernel: str, **settings: Any) -> Any:
            wrapper = make(workspace, kernel, **settings)
            self._kernels[id(wrapper)] = kernel
            return wrapper

        def counted(attention: PagedAttention, pages: PageLists) -> None:
            kernel = self._kernels[id(attention._wrapper)]
            self._counts[kernel if attention._is_causal else "pieces"] += 1
            of_padding = attention._shape.num_blocks - 1  # read by rows whose results are not
            if self.last_block is not None and pages.pages[pages.pages < of_padding].gt(self.last_block).any():
                assert kernel == "fa2"
                self.num_far += bool(pages.cu_query.diff().max() > MOST_DRAFTS + 1)
            plan_pages(attention, pages)

        def counted_eager(backend: flashinfer.FlashInferAttention, rows: AttentionRows) -> PlannedAttention:
            self._counts = self.num_eager
            return plan(backend, rows)

        def counted_again(part: CapturedPart, rows: AttentionRows) -> None:
            self._counts = Counter() if part._planned is None else self.num_replayed
            plan_again(part, rows)

        def counted_pieces(part: SplitPart, rows: AttentionRows) -> None:
            self._counts = self.num_replayed
            plan_pieces(part, rows)

        def counted_reads(graph: StepGraph, requests: Sequence[RunningRequest]) -> bool:
            reads = reads_blocks(graph, requests)
            self.num_left_out += not reads
            return reads

        patch.setattr(flashinfer, "_wrapper", noted)
        patch.setattr(PagedAttention, "plan_pages", counted)
        patch.setattr(flashinfer.FlashInferAttention, "plan", counted_eager)
        patch.setattr(CapturedPart, "plan_again", counted_again)
        patch.setattr(SplitPart, "plan_again", counted_pieces)
        patch.setattr(StepGraph, "reads_blocks_of", counted_reads)

    def limit_fa3(self, patch: pytest.MonkeyPatch, last_block: int) -> None:
        """Let "fa3" read no later blocks, so that some graphs of a dozen prompt tokens cannot be replayed."""
        self.last_block = last_block
        patch.setattr(flashinfer, "last_block_of_fa3", lambda shape, release: last_block)
        patch.setattr(flashinfer, "_LEAST_LEFT_OUT", 12)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    """Use FlashInfer, or its stand-in without CUDA; return its plans."""
    monkeypatch.setattr(flashinfer, "_FA3_TILE", 1)  # so that graphs of tens of prompt tokens are of "fa3"
    if HAS_CUDA:
        pytest.importorskip("flashinfer")
    else:
        capture_in_parts(monkeypatch)
        serve_with_flashinfer(monkeypatch)
    counted = Plans()
    counted.watch(monkeypatch)
    return counted


@pytest.fixture(scope="module")
def totals() -> Iterator[WorkloadTotals]:
    """Collect the totals of the module; print them at its end and assert that few tokens differ from the oracle."""
    totals = WorkloadTotals()
    yield totals
    if HAS_CUDA:
        tally = totals.tally
        print(f"\n{tally.num_compared} tokens, {tally.num_stopped} of them not the oracle's choice")
        assert tally.num_compared > 0 and tally.num_stopped <= MOST_CHANGED * tally.num_compared
    else:
        totals.report()


def run_seed(name: str, form: str, seed: int, num_drafts: int, prefill_tokens: int = 40) -> WorkloadOutcome:
    half = {"dense": "half", "experts": "half, experts", "gated delta": "half, gated delta"}
    rng = random.Random(f"flashinfer {name} {seed}")
    drafted = rng.randrange(1, num_drafts + 1) if num_drafts else 0
    work = make_workload(FLAVOURS[name], 7000 + seed, drafted, models=MODEL_FORMS[half[form] if HAS_CUDA else form])
    config = replace(work.config, attention_backend="flashinfer")
    work = replace(work, config=with_graphs(config, prefill_tokens=prefill_tokens))
    return run_workload(work, make_drafter(rng, work) if drafted else None)


@by_drafts
@pytest.mark.parametrize(
    ("form", "seeds"),
    [
        pytest.param("dense", SHORT, id="dense"),
        pytest.param("experts", SHORT, id="experts", marks=pytest.mark.long),
        pytest.param("gated delta", SHORT, id="gated-delta", marks=pytest.mark.long),
        pytest.param("dense", range(8, 20), id="dense-more", marks=pytest.mark.slow),
        pytest.param("experts", range(8, 20), id="experts-more", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.long) for name in FLAVOURS]
)
def test_random_workloads_with_flashinfer_match_the_oracle(
    name: str, form: str, seeds: range, num_drafts: int, totals: WorkloadTotals, plans: Plans
) -> None:
    # Prompt lookup finds nothing in few texts that share nothing.
    drafts = ("draft_tokens", "accepted_tokens") if num_drafts and FLAVOURS[name].num_texts is None else ()
    enough = 1 if seeds is SHORT else None
    exercises = ("graph_steps", *drafts)

    def run(seed: int) -> WorkloadOutcome:
        return run_seed(name, form, seed, num_drafts, prefill_tokens=12)  # so that some steps have no graph

    totals.run_batch(name, seeds, run, exercises, enough=enough)
    print(plans.num_eager, plans.num_replayed)
    assert plans.num_eager and plans.num_replayed["fa2"]
    assert (plans.num_eager + plans.num_replayed)["fa3"] or not flashinfer.is_hopper(torch.device("cuda"))


@by_drafts
@pytest.mark.parametrize(
    "name", ["roomy", *(pytest.param(name, marks=pytest.mark.long) for name in FLAVOURS if name != "roomy")]
)
def test_random_workloads_with_split_kv_attention_match_the_oracle(
    name: str, num_drafts: int, totals: WorkloadTotals, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the query tokens of prompts were too few for the GPU."""
    monkeypatch.setattr(flashinfer, "num_multiprocessors", lambda device: 800)
    totals.run_batch(name, SHORT, lambda seed: run_seed(name, "dense", seed, num_drafts), ("graph_steps",), enough=1)
    print(plans.num_replayed)
    assert plans.num_replayed["pieces"]


@pytest.mark.parametrize(
    ("name", "last_block", "num_drafts"),
    [
        ("roomy", 2, 0),
        ("roomy", 5, MOST_DRAFTS),
        pytest.param("roomy", 2, MOST_DRAFTS, marks=pytest.mark.long),
        pytest.param("roomy", 5, 0, marks=pytest.mark.long),
        *(pytest.param("disturbed", last, n, marks=pytest.mark.long) for last in (2, 5) for n in (0, MOST_DRAFTS)),
    ],
)
def test_attention_kernels_read_no_block_beyond_their_addressable_range(
    name: str, last_block: int, num_drafts: int, totals: WorkloadTotals, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a cache were larger than the reach of "fa3"."""
    plans.limit_fa3(monkeypatch, last_block)
    exercises = ("graph_steps", *(("draft_tokens",) if num_drafts else ()))
    totals.run_batch(name, range(3), lambda seed: run_seed(name, "dense", seed, num_drafts), exercises)
    print(plans.num_eager, plans.num_replayed, plans.num_far, plans.num_left_out)
    assert plans.num_eager["fa2"] and plans.num_replayed["fa2"] and plans.num_far and plans.num_left_out


@dataclass
class Prompt:
    block_ids: list[int]
    is_prefilling: bool = True


@pytest.mark.parametrize(("blocks", "reads"), [([[0], [3]], True), ([[4], [1]], False), ([[1], [4, 2]], False)])
def test_graph_is_not_replayed_if_a_prompt_block_is_beyond_its_range(blocks: list[list[int]], reads: bool) -> None:
    graph = SimpleNamespace(_attention=SimpleNamespace(last_block=3))
    requests = [Prompt([9], is_prefilling=False), *map(Prompt, blocks)]
    assert StepGraph.reads_blocks_of(graph, requests) is reads  # type: ignore[arg-type]
