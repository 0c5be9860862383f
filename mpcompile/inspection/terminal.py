"""A report in a terminal, with rich."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from mpcompile.inspection.report import CastRecord, NodeRecord, Report

_MIN_WIDTH = 80
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}


def summary(report: Report) -> str:
    """A few lines: the share of low operations forward and backward, the exceptions, the casts."""
    lines = [f"mixprec: {_graphs(report)}, low type {report.dtype}, policy {report.preset}"]
    for direction in ("forward", "backward"):
        matmuls = [node for node in report.matmuls() if node.direction == direction]
        if matmuls:
            low = [node for node in matmuls if runs_low(node)]
            lines.append(
                f"  {direction + ':':<9} {len(low)} of {len(matmuls)} matmuls, convolutions and attentions run low"
            )
    lines += [f"  kept in fp32: {count} x {why}" for why, count in _exceptions(report).most_common()]
    lines.append(_cast_line(report.casts))
    lines += _scaling_line(report)
    return "\n".join(lines)


def render(report: Report) -> str:
    """The whole report: the summary, then a table of matmuls and user decisions with the rule that decided each."""
    console = Console(file=io.StringIO(), width=max(_MIN_WIDTH, Console().width), color_system=None)
    console.print(summary(report), markup=False, highlight=False)
    console.print(_table(node for node in report.nodes if _is_shown(node)))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().rstrip()


def runs_low(node: NodeRecord) -> bool:
    """Whether an operation reads 16-bit operands."""
    return any(dtype in ("bfloat16", "float16") for dtype in node.inputs)


def _graphs(report: Report) -> str:
    count = len(report.graphs)
    return f"{count} graph{'s' if count != 1 else ''}, {len(report.nodes)} operations"


def _exceptions(report: Report) -> Counter[str]:
    kept = (node for node in report.matmuls() if not runs_low(node))
    return Counter(node.reason for node in kept)


def _scaling_line(report: Report) -> list[str]:
    results = [result for graph in report.graphs for result in graph.results if result.name == "insert_loss_scaling"]
    why = Counter(change.reason for result in results for change in result.changes)
    return [f"  scaling:  {', '.join(f'{count} {reason}' for reason, count in why.items())}"] if why else []


def _cast_line(casts: tuple[CastRecord, ...]) -> str:
    narrow = [cast for cast in casts if cast.after != "float32"]
    moved = sum(cast.bytes or 0 for cast in casts)
    dynamic = any(cast.bytes is None for cast in casts)
    return (
        f"  casts:    {len(narrow)} narrow ({sum(bool(c.parameter) for c in narrow)} of parameters), "
        f"{len(casts) - len(narrow)} widen, {moved / 1e6:.2f} MB{' and more' if dynamic else ''} if none is fused"
    )


def _is_shown(node: NodeRecord) -> bool:
    return node.op_class == "low" or (node.rule != "class" and node.op_class != "exact")


def _table(nodes: Iterable[NodeRecord]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("", "operation", "reads", "makes", "decided by", "module", "source"):
        table.add_column(title, overflow="fold")
    for node in nodes:
        reads = "/".join(sorted({_SHORT.get(dtype, dtype) for dtype in node.inputs}))
        table.add_row(
            "fw" if node.direction == "forward" else "bw",
            node.name,
            reads,
            _SHORT.get(node.output, node.output),
            f"{node.rule}: {node.reason}",
            node.module,
            node.source.rsplit("/", 1)[-1],
        )
    return table
