"""Plots of the serving benchmark, drawn with matplotlib."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from measuring.serving_figures import ServingFigures

MISSING = "plots need matplotlib, which is not installed: pip install matplotlib, or leave --plots out"


def can_plot() -> bool:
    """Return True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_plots(
    folder: Path, delays: Mapping[str, Sequence[float]], figures: Mapping[str, ServingFigures]
) -> list[Path]:
    """Plot the distribution of the time to first token, the throughput and the hit rates; return the PNG files.

    Args:
        delays: Times to first token in seconds, by engine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_write_delays(folder, delays), _write_throughput(folder, figures)]


def _write_delays(folder: Path, delays: Mapping[str, Sequence[float]]) -> Path:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="time to first token, ms", ylabel="share of requests")
    modes, drafts = ([name.split(", ")[index] for name in delays] for index in (0, -1))
    for (name, values), mode, num_drafts in zip(delays.items(), modes, drafts, strict=True):
        ordered = [1e3 * value for value in sorted(values)]
        shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
        color, style = list(dict.fromkeys(modes)).index(mode), ("-", "--")[num_drafts != drafts[0]]
        axes.step(ordered, shares, where="post", label=name, color=f"C{color}", linestyle=style)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend()
    return _saved(figure, folder / "time_to_first_token.png")


def _write_throughput(folder: Path, figures: Mapping[str, ServingFigures]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    names, found = list(figures), list(figures.values())
    axes = figure.add_subplot(1, 2, 1, title="generated tokens/s")
    axes.barh(names, [each.generated_per_s for each in found])
    axes.invert_yaxis()
    axes = figure.add_subplot(1, 2, 2, title="prompt tokens without prefill, %\n(outline: upper bound for any cache)")
    axes.barh(names, [100 * each.best_hit_rate for each in found], fill=False)
    axes.barh(names, [100 * each.hit_rate for each in found])
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    return _saved(figure, folder / "throughput_and_hits.png")


def _saved(figure: object, file: Path) -> Path:
    figure.savefig(file, dpi=120)  # type: ignore[attr-defined]
    return file
