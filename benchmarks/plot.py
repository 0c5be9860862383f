"""A picture of a run: mixprec against compile+autocast, which is 1."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.peers import BASELINE, MIXPREC
from benchmarks.results import Run
from benchmarks.table import RATIOS

COLORS = ("#4477aa", "#ccbb44", "#aa3377")


def plot(run: Run, path: Path) -> None:
    """Write a PNG: a group of bars for every workload, time, saved bytes and error.

    A ratio that is zero, infinite or unknown has no place on the axis; the tables show it.
    """
    figure = Figure(figsize=(max(7.0, 1.3 * len(run.results) + 2), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(RATIOS)
    for index, (quantity, label) in enumerate(RATIOS.items()):
        ratios = [result.ratio(quantity, MIXPREC) for result in run.results]
        drawn = [(number, ratio) for number, ratio in enumerate(ratios) if ratio and math.isfinite(ratio)]
        places = [number + (index - 1) * width for number, _ in drawn]
        heights = [ratio for _, ratio in drawn]
        # Bars grow from 1, the baseline: what reaches below it is better.
        bars = axes.bar(places, [h - 1 for h in heights], width, bottom=1, color=COLORS[index], label=label)
        axes.bar_label(bars, [f"{height:.2f}" for height in heights], fontsize=7, padding=2)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks(range(len(run.results)), [_broken(result.workload) for result in run.results], fontsize=9)
    axes.set_ylabel(f"{MIXPREC} / {BASELINE} (log scale)")
    native = "" if run.hardware[f"native_{run.dtype}"] else f", no {run.dtype} instructions"
    axes.set_title(
        f"{run.dtype}, policy {run.preset}; below 1 is better\n"
        f"{run.hardware['gpu'] or run.hardware['cpu']}{native}, torch {run.versions['torch']}",
        fontsize=10,
    )
    axes.margins(y=0.12)
    figure.legend(loc="outside lower center", ncols=len(RATIOS), frameon=False)
    figure.savefig(path, dpi=150)


def _broken(name: str) -> str:
    return name.replace(", ", ",\n").replace(" inference", "\ninference")
