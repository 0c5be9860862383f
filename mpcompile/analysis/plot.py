"""A comparison as a picture: error and contribution of every operation by depth."""

from __future__ import annotations

from pathlib import Path

from mpcompile.analysis.comparison import Comparison, NodeError

_COLOURS = {"forward": "#2a6fbb", "backward": "#c2571a"}


def draw(comparison: Comparison, path: str | Path) -> None:
    """Write the picture to ``path``; its ending chooses the format. Raises ``ImportError`` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Comparison.plot needs matplotlib: pip install matplotlib.") from error
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    for direction, colour in _COLOURS.items():
        chosen = [(i, node) for i, node in enumerate(comparison.nodes) if node.direction == direction]
        places = [i for i, _ in chosen]
        above.plot(places, [_shown(node.error) for _, node in chosen], ".", color=colour, label=direction)
        above.plot(places, [_shown(node.error_fp32) for _, node in chosen], ".", color="#bbbbbb", markersize=3)
        below.bar(places, [100 * _share(node) for _, node in chosen], color=colour, width=1.0)
    above.set_yscale("log")
    above.set_ylabel("relative error (grey: fp32)")
    above.legend(loc="best")
    below.set_ylabel("% of the error of\nloss and gradients")
    below.set_xlabel("operations, in the order they run")
    figure.suptitle(f"{comparison.dtype} against fp64")
    figure.savefig(path)


def _shown(error: float) -> float:
    """NaN, which is left out of a plot, for what a logarithmic axis has no place for."""
    return error if 0 < error < float("inf") else float("nan")


def _share(node: NodeError) -> float:
    return node.contribution + node.amplified
