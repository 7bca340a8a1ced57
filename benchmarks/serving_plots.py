"""Pictures of what serving measured, by matplotlib."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from serving_figures import ServingFigures

MISSING = "plots need matplotlib, which is not installed: pip install matplotlib, or leave --plots out"


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return find_spec("matplotlib") is not None


def write_plots(
    folder: Path, delays: Mapping[str, Sequence[float]], figures: Mapping[str, ServingFigures]
) -> list[Path]:
    """Write the distribution of the time to first token, and bars of throughput and hits; return the PNG files.

    Args:
        delays: Engine -> seconds to the first token of each request.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_write_delays(folder, delays), _write_bars(folder, figures)]


def _write_delays(folder: Path, delays: Mapping[str, Sequence[float]]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="time to first token, s", ylabel="share of requests")
    for name, values in delays.items():
        ordered = sorted(values)
        axes.step(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))], where="post", label=name)
    axes.grid(alpha=0.3)
    axes.legend()
    return _saved(figure, folder / "time_to_first_token.png")


def _write_bars(folder: Path, figures: Mapping[str, ServingFigures]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    names, found = list(figures), list(figures.values())
    axes = figure.add_subplot(1, 2, 1, title="generated tokens/s")
    axes.barh(names, [each.generated_per_s for each in found])
    axes.invert_yaxis()
    axes = figure.add_subplot(1, 2, 2, title="prompt tokens skipped, % (outline: the most)")
    axes.barh(names, [100 * each.best_hit_rate for each in found], fill=False)
    axes.barh(names, [100 * each.hit_rate for each in found])
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    return _saved(figure, folder / "throughput_and_hits.png")


def _saved(figure: object, file: Path) -> Path:
    figure.savefig(file, dpi=120)  # type: ignore[attr-defined]
    return file
