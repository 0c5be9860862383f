"""A comparison in a terminal, with rich: the operations to look at first, and the gradients they spoil."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import PurePath

from rich.console import Console
from rich.table import Table

from mpcompile.analysis.comparison import Comparison, NodeError, ResultError

_MIN_WIDTH = 80
_ROWS = 10


def render(comparison: Comparison) -> str:
    """A summary, the worst operations, the worst gradients; 80 columns or the width of the terminal."""
    console = Console(file=io.StringIO(), width=max(_MIN_WIDTH, Console().width), color_system=None)
    console.print("\n".join(_summary(comparison)), markup=False, highlight=False)
    console.print(_operations(comparison.worst(_ROWS)))
    console.print()
    console.print(_results(comparison.outputs, comparison.gradients))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().rstrip()


def _summary(comparison: Comparison) -> Iterable[str]:
    scale = "" if comparison.loss_scale is None else f", loss scale {comparison.loss_scale:g}"
    yield f"mixprec against fp64: {comparison.dtype}{scale}, {len(comparison.nodes)} operations"
    of = "loss and gradients" if comparison.gradients else "the outputs"
    yield f"  relative error of {of}: {_number(comparison.error)} on average"
    broken = comparison.first_nonfinite()
    if broken is not None:
        yield f"  NOT FINITE first in {where(broken.user_op, broken.module, broken.source)}, {broken.direction}"
    yield f"  the operations account for {comparison.attributed:.0%} of it, to first order"
    for barrier in comparison.barriers:
        yield f"  not seen through: {barrier}"
    for operation in comparison.unmeasured:
        yield f"  what it rounds is not seen: {operation}"
    yield ""


def where(op: str, module: str, source: str) -> str:
    """``addmm in layers.3.mlp (model.py:41)``."""
    name = op.removeprefix("aten.").removeprefix("prims.").split(".")[0]
    place = f" in {module}" if module else ""
    line = f" ({_line(source)})" if source else ""
    return f"{name}{place}{line}"


def _operations(nodes: Iterable[NodeError]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title, justify in (("share", "right"), ("", "left"), ("what it does", "left"), ("error", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for title in ("module", "operation", "line"):
        table.add_column(title, overflow="fold")
    for node in nodes:
        op = node.user_op.removeprefix("aten.").removeprefix("prims.").split(".")[0]
        table.add_row(
            f"{node.contribution + node.amplified:.1%}",
            "fw" if node.direction == "forward" else "bw",
            what_it_does(node),
            _number(node.error),
            node.module,
            op,
            _line(node.source),
        )
    return table


def what_it_does(node: NodeError) -> str:
    """What an operation does to the error, in two words."""
    if node.breaks:
        return "not finite"
    return f"magnifies {node.amplification:.0f} x" if node.amplified > abs(node.contribution) else "rounds"


def _results(outputs: Iterable[ResultError], gradients: Iterable[ResultError]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("output, gradient of", overflow="fold", min_width=30)
    for name in ("error", "in fp32", "norm"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    worst = sorted(gradients, key=lambda result: -result.effective)[:_ROWS]
    for result in (*list(outputs)[:_ROWS], *worst):
        numbers = map(_number, (result.error, result.error_fp32, result.size))
        table.add_row(result.name, *numbers, "zero but for rounding" if result.cancellation > 100 else "")
    return table


def _number(value: float) -> str:
    return f"{value:.1e}"


def _line(source: str) -> str:
    return PurePath(source).name
