"""Measure each kernel, with its floor and with other libraries in the same run.

    PYTHONPATH=. python3 benchmarks/kernels.py [--json FILE] [--quick] [--only SECTION ...]

Times are medians of one launch inside a CUDA graph of several, on random data. The floor is the time of a plain copy of
the bytes that the kernel must move, or of a large bf16 GEMM with its FLOPs, whichever is longer; both are measured in
this run. The scan must move x, y, B, C and dt once. A clear only writes. A state update with K drafts reads one state
and writes 1 + K. Peers (mamba-ssm, causal-conv1d, plain torch) do the same work; the report names those that are not
installed. Scans with boundary states are compared with scans of the same tokens without them, in graphs that are
replayed in turn.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import align_copy
import attention
import slot_copies
import ssd_scan
import state_kernels
import torch
from measuring import scan_error
from measuring.ceilings import copy_us, matmul_tflops
from measuring.graph_timing import MEMCPY_NOTE
from measuring.kernel_figures import (
    Figure,
    align_figures,
    attention_figures,
    scan_figures,
    slot_figures,
    state_figures,
    table,
    token_figures,
)
from measuring.machine import describe_machine
from peers.causal_conv1d_peer import peer_conv
from peers.mamba_ssm_peer import missing_peer

GROWTH_CASES = ("1 x 4k", "1 x 32k", "1 x 128k")
MOST_GROWTH = 1.15
LARGE_COPY = 3 * 2**28


@dataclass(frozen=True, slots=True)
class Selection:
    """The cases that a run measures, by section."""

    models: tuple[str, ...]
    scan_cases: tuple[str, ...]
    peer_chunks: tuple[int, ...]
    boundary_rows: tuple[int, ...]
    state_cases: tuple[tuple[int, int], ...]
    slot_models: tuple[str, ...]
    slot_counts: tuple[int, ...]
    align_cases: tuple[tuple[int, int], ...]
    token_counts: tuple[int, ...]
    with_attention: bool


FULL = Selection(
    models=("8B", "Nano"),
    scan_cases=tuple(ssd_scan.CASES),
    peer_chunks=ssd_scan.PEER_CHUNKS,
    boundary_rows=(1, 8),
    state_cases=tuple((rows, drafts) for drafts in (0, 3, 7) for rows in state_kernels.ROWS),
    slot_models=tuple(model.name for model in slot_copies.MODELS),
    slot_counts=slot_copies.COUNTS,
    align_cases=align_copy.CASES,
    token_counts=attention.TOKENS,
    with_attention=True,
)
QUICK = Selection(
    models=("8B",),
    scan_cases=("1 x 4k", "8 x 4k", "1 x 32k"),
    peer_chunks=(256,),
    boundary_rows=(1,),
    state_cases=((64, 0), (64, 3)),
    slot_models=("8B bf16",),
    slot_counts=(4, 16),
    align_cases=((8, 8), (256, 0)),
    token_counts=(4096,),
    with_attention=False,
)


class Report:
    """Results so far; each section is printed when it ends and kept for the JSON file."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._document: dict[str, Any] = {"machine": describe_machine(), "seconds": {}, "failed": []}

    @property
    def has_failures(self) -> bool:
        """True if a section failed."""
        return bool(self._document["failed"])

    def add(self, title: str, section: Callable[[], tuple[str, object]]) -> None:
        """Run a section, which returns Markdown and a value for JSON; report a failure and continue."""
        began = time.perf_counter()
        print(f"\n## {title}\n", flush=True)
        try:
            text, self._document[title] = section()
            print(text, flush=True)
        except Exception as error:  # the results of other sections are still useful
            traceback.print_exc()
            print(f"This section failed: {type(error).__name__}: {error}", flush=True)
            self._document["failed"].append(title)
        torch.cuda.empty_cache()
        self._document["seconds"][title] = time.perf_counter() - began
        if self._file is not None:
            self._file.write_text(json.dumps(self._document, indent=2) + "\n")

    def seconds(self) -> str:
        """Return the time of each section as text."""
        seconds = self._document["seconds"]
        each = ", ".join(f"{name} {taken:.0f}" for name, taken in seconds.items())
        return f"Seconds: {each}; {sum(seconds.values()):.0f} in all."


def sections(selection: Selection) -> Iterator[tuple[str, Callable[[], tuple[str, object]]]]:
    """Yield the title of each section and the function that measures it."""
    chosen = selection
    yield "Ceilings", ceilings
    yield "Scan", lambda: scan(chosen)
    yield "Boundary states", lambda: boundaries(chosen)
    yield "Error", lambda: error(chosen)
    yield "States", lambda: reported(state_figures(chosen.models, list(chosen.state_cases)))
    yield "Slots", lambda: reported(slot_figures(chosen.slot_models, chosen.slot_counts))
    yield "Align", lambda: reported(align_figures(chosen.slot_models, chosen.align_cases))
    yield "Tokens", lambda: reported(token_figures(chosen.token_counts))
    if chosen.with_attention:
        yield "Attention", lambda: reported(attention_figures())


def reported(figures: Iterable[Figure]) -> tuple[str, object]:
    """Return the measurements as a Markdown table and as JSON types."""
    figures = list(figures)
    return table(figures), [figure.record() for figure in figures]


def ceilings() -> tuple[str, object]:
    """Measure the copy speed and the GEMM speed, and name missing peers."""
    missing = [
        reason for reason in (missing_peer(), None if peer_conv() else "causal-conv1d is not installed") if reason
    ]
    measured = {"copy, TB/s": LARGE_COPY / copy_us(LARGE_COPY) / 1e6, "matmul, TFLOP/s": matmul_tflops()}
    text = "; ".join(f"{name}: {value:,.2f}" for name, value in measured.items())
    absent = "; ".join(missing) or "none"
    return f"{text}. {MEMCPY_NOTE}\n\nMissing peers: {absent}.", measured | {"missing peers": missing}


def scan(selection: Selection) -> tuple[str, object]:
    """Measure the prefill scan, and how its time grows with the number of tokens."""
    figures = list(scan_figures(selection.models, selection.scan_cases, selection.peer_chunks))
    growths = [growth(figures, model) for model in selection.models]
    lines = [
        f"{found['model']}, ns a token: "
        + ", ".join(f"{case} {ns:.1f}" for case, ns in found["ns a token"].items())
        + f"; single rows of 4k and more: slowest over fastest {found['spread']:.3f}, "
        + ("within" if found["holds"] else "above")
        + f" {MOST_GROWTH}."
        for found in growths
    ]
    text, records = reported(figures)
    return "\n\n".join([text, *lines]), {"figures": records, "growth": growths}


def growth(figures: Iterable[Figure], model: str) -> dict[str, Any]:
    """Return the scan's time per token in each case, and how it varies with the length of single prompts."""
    us = {figure.case: figure.us for figure in figures if (figure.kernel, figure.shape) == ("ssd_scan", model)}
    ns = {case: taken * 1000 / sum(ssd_scan.CASES[case]) for case, taken in us.items()}
    long_rows = [ns[case] for case in GROWTH_CASES if case in ns]
    spread = max(long_rows) / min(long_rows)
    return {"model": model, "ns a token": ns, "spread": spread, "holds": spread <= MOST_GROWTH}


def boundaries(selection: Selection) -> tuple[str, object]:
    """Measure how much time boundary states add to the scan of 4k prompts."""
    return boundary_table(list(ssd_scan.measure_boundaries(selection.models, selection.boundary_rows)))


def boundary_table(figures: list[ssd_scan.Figure]) -> tuple[str, object]:
    """Return times with and without boundary states, and their ratios, as Markdown and as JSON types."""
    ns = {(figure.model, figure.case, figure.form): figure.ns for figure in figures}
    plain, *others = ssd_scan.BOUNDARIES
    lines = [f"| shape | case | {plain}, ns a token | {' | '.join(f'{name}: ns, ratio' for name in others)} |"]
    lines.append("|---|---|---:|" + "---:|" * len(others))
    records = []
    for model, case in dict.fromkeys((figure.model, figure.case) for figure in figures):
        without = ns[model, case, plain]
        ratios = {name: ns[model, case, name] / without for name in others}
        cells = [f"{ns[model, case, name]:.2f}, {ratio:.3f}" for name, ratio in ratios.items()]
        lines.append(f"| {model} | {case} | {without:.2f} | {' | '.join(cells)} |")
        records.append({"shape": model, "case": case, "ns a token": without, "ratios": ratios})
    return "\n".join(lines), records


def error(selection: Selection) -> tuple[str, object]:
    """Measure the errors of the scans, relative to float64."""
    errors = scan_error.measure_errors(selection.peer_chunks)
    return scan_error.table(errors), [asdict(found) for found in errors]


def main() -> int:
    """Measure, print Markdown and write JSON; return 1 if a section failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    parser.add_argument("--quick", action="store_true", help="measure a few cases only")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="sections to run, by title")
    arguments = parser.parse_args()
    selected = dict(sections(QUICK if arguments.quick else FULL))
    unknown = sorted(set(arguments.only or ()) - set(selected))
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(selected)}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.manual_seed(0)
    report = Report(arguments.json)
    for title, section in selected.items():
        if title in (arguments.only or selected):
            report.add(title, section)
    print(f"\n{report.seconds()}")
    return 1 if report.has_failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
