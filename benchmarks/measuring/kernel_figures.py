"""Measurements of all kernels in one format: time, floor, and the times of peers in the same run."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import align_copy
import attention
import slot_copies
import ssd_scan
import state_kernels
import torch
from measuring.ceilings import floor_us
from peers.mamba_ssm_peer import peer_function

from megatron_mamba_cache.kernels.attention.choice import choose_attention


@dataclass(frozen=True, slots=True)
class Figure:
    """Times of one kernel in one case, in microseconds.

    Args:
        shape: "8B" or "Nano", followed by the dtype of the states if it matters; "" if both models have the same shape.
        floor_us: Time to move the kernel's bytes or to compute its FLOPs, whichever is longer; None if it moves no
            bytes.
        peers: Time of other implementations of the same work, by name.
    """

    kernel: str
    shape: str
    case: str
    us: float
    floor_us: float | None = None
    peers: dict[str, float] = field(default_factory=dict)

    @property
    def of_floor(self) -> float | None:
        """Floor divided by the measured time."""
        return self.floor_us / self.us if self.floor_us else None

    def record(self) -> dict[str, Any]:
        """Return the measurement as JSON types."""
        speedups = {name: us / self.us for name, us in self.peers.items()}
        return asdict(self) | {"of floor": self.of_floor, "times faster than": speedups}


def table(figures: Iterable[Figure]) -> str:
    """Return the measurements as a Markdown table."""
    lines = ["| kernel | shape | case | µs | floor, µs | of floor | peers: µs, times slower |"]
    lines.append("|---|---|---|---:|---:|---:|---|")
    for figure in figures:
        peers = "; ".join(f"{name} {us:,.1f}, {us / figure.us:.2f}" for name, us in figure.peers.items())
        floor = f"{figure.floor_us:,.1f} | {figure.of_floor:.3f}" if figure.floor_us else " | "
        named = f"| {figure.kernel} | {figure.shape} | {figure.case} |"
        lines.append(f"{named} {figure.us:,.1f} | {floor} | {peers} |")
    return "\n".join(lines)


def scan_figures(models: Iterable[str], cases: Iterable[str], peer_chunks: tuple[int, ...]) -> Iterator[Figure]:
    """Yield the times of the prefill scan in the variant that the op chooses and, if measured, in the portable one."""
    measured = list(ssd_scan.measure(models, cases, peer_chunks))
    times = {(figure.model, figure.case, figure.form): figure.ns for figure in measured}
    for model, case in dict.fromkeys((figure.model, figure.case) for figure in measured):
        num_heads, num_tokens = ssd_scan.HEADS[model], sum(ssd_scan.CASES[case])
        floor = floor_us(ssd_scan.tokens_bytes(num_heads, num_tokens), ssd_scan.scan_flops(num_heads, num_tokens))
        us = {form: ns * num_tokens / 1000 for (*key, form), ns in times.items() if key == [model, case]}
        peers = {"mamba-ssm": us["mamba-ssm"]} if "mamba-ssm" in us else {}
        for form, kernel in (("ours", "ssd_scan"), ("portable", "ssd_scan, portable form")):
            if form in us:
                yield Figure(kernel, model, case, us[form], floor, peers)


def state_figures(models: Iterable[str], cases: list[tuple[int, int]]) -> Iterator[Figure]:
    """Yield the times of the state update in each case (number of requests and drafts), and of both convolutions."""
    peer = peer_function("selective_state_update", "selective_state_update")
    for layer in (layer for layer in state_kernels.LAYERS if layer.name in models):
        yield from next_to_peers(
            state_kernels.measure_states(layer, cases, [state_kernels.state_verify_module.TILING], peer)
        )
        tilings = [state_kernels.causal_conv_module.TILING], [state_kernels.conv_verify_module.TILING]
        yield from next_to_peers(state_kernels.measure_convs(layer, *tilings))


def next_to_peers(measured: Iterable[state_kernels.Figure]) -> Iterator[Figure]:
    """Yield the measurements of our kernels, each with the times of the peers in the same case."""
    figures = list(measured)
    for figure in figures:
        if figure.tiling is None:
            continue
        same_case = (other for other in figures if other.tiling is None and other.case == figure.case)
        peers = {other.kernel: other.us for other in same_case}
        yield Figure(figure.kernel, figure.layer, figure.case, figure.us, figure.memcpy_us, peers)


def slot_figures(models: Iterable[str], counts: tuple[int, ...]) -> Iterator[Figure]:
    """Yield the times of copies of whole slots; the peers are other ways to copy them."""
    for model in (model for model in slot_copies.MODELS if model.name in models):
        bench = slot_copies.Bench(model)
        bench.check()
        measured = slot_copies.measure(bench, counts)
        del bench
        torch.cuda.empty_cache()
        for count in counts:
            ways = {figure.way: figure for figure in measured if figure.slots == count}
            copied = ways.pop("copy_slots")
            peers = {way: figure.us for way, figure in ways.items()}
            yield Figure("copy_slots", model.name, f"{count} slots", copied.us, copied.memcpy_us, peers)


def align_figures(models: Iterable[str], cases: Iterable[tuple[int, int]], num_drafts: int = 3) -> Iterator[Figure]:
    """Yield the times of the align copy in each case (number of requests, and number of copied states)."""
    for model in (model for model in align_copy.MODELS if model.name in models):
        bench = align_copy.Bench(model, num_drafts)
        bench.check()
        for figure in align_copy.measure(bench, cases, [align_copy.TILING]):
            case = f"{figure.rows} rows, {figure.copying} copy"
            yield Figure("align_copy", model.name, case, figure.us, figure.memcpy_us)
        del bench
        torch.cuda.empty_cache()


def attention_figures() -> Iterator[Figure]:
    """Yield the times of attention with the default backend of this machine; the peer is the torch reference."""
    shape = attention.shape_of(32, torch.device("cuda", torch.cuda.current_device()))
    chosen, plain = choose_attention("auto", shape), choose_attention("reference", shape)
    for case in attention.CASES:
        ours, twin = attention.measure_attention(case, shape, {"chosen": chosen, "reference": plain})
        peers = {} if type(chosen) is type(plain) else {"torch twin": twin.us}
        floor = floor_us(int(ours.num_bytes), ours.num_flops)
        yield Figure(f"attention by {chosen.name}", "8B", case.name, ours.us, floor, peers)
        torch.cuda.empty_cache()


def token_figures(num_tokens: tuple[int, ...]) -> Iterator[Figure]:
    """Yield the times of the norms and the KV append; the peers are their references or torch's own ops."""
    measured = attention.measure_token_kernels(num_tokens)
    for ours, twin in zip(measured[::2], measured[1::2], strict=True):
        kernel, *shape, case = ours.case.split(", ")
        peer = "torch twin" if twin.way.endswith("_ref") else twin.way
        yield Figure(kernel, "".join(shape), case, ours.us, ours.memcpy_us, {peer: twin.us})
