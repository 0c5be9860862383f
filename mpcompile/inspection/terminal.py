"""A report in a terminal, with rich: first what a user asks first, then the modules, then the operations."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from mpcompile.inspection.module_table import module_table
from mpcompile.inspection.report import CastRecord, NodeRecord, Report
from mpcompile.inspection.rollup import LOW
from mpcompile.inspection.sizes import show_bytes

_MIN_WIDTH = 80
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def summary(report: Report) -> str:
    """A few lines: the share of low operations forward and backward, the exceptions, the casts, what backward keeps."""
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
    lines += _saved_line(report)
    lines += _scaling_line(report)
    return "\n".join(lines)


def render(report: Report) -> str:
    """The whole report: the summary, the modules, the matmuls and user decisions with the rule that decided each."""
    console = Console(
        file=io.StringIO(),
        width=max(_MIN_WIDTH, Console().width),
        color_system=None,
        markup=False,  # names come from the model
        highlight=False,
        emoji=False,
    )
    console.print(summary(report))
    if len(report.rollups) > 1:
        console.print()
        console.print(module_table(report))
    console.print()
    console.print(_table(_shown(report)))
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()


def runs_low(node: NodeRecord) -> bool:
    """Whether an operation reads 16-bit operands."""
    return any(dtype in LOW for dtype in node.inputs)


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
        f"{len(casts) - len(narrow)} widen, {show_bytes(moved)}{' and more' if dynamic else ''} if none is fused"
    )


def _saved_line(report: Report) -> list[str]:
    saved, in_fp32 = report.saved_bytes, report.saved_bytes_fp32
    if saved is None or not in_fp32:
        return []
    return [f"  saved:    {show_bytes(saved)} kept for backward, {saved / in_fp32:.2f} x of fp32 (predicted)"]


def _shown(report: Report) -> list[NodeRecord]:
    """What the user may ask about: matmuls and what was decided specially; where there is none, all that computes."""
    computing = [node for node in report.nodes if node.op_class != "exact"]
    return [node for node in computing if node.op_class == "low" or node.rule != "class"] or computing


def _table(nodes: Iterable[NodeRecord]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("", "operation", "reads", "makes", "decided by", "module", "source"):
        table.add_column(title, overflow="fold")
    for alike in _alike(nodes):
        node, *others = alike
        table.add_row(
            "fw" if node.direction == "forward" else "bw",
            f"{node.name} and {len(others)} more" if others else node.name,
            _reads(node),
            _SHORT.get(node.output, node.output),
            f"{node.rule}: {node.reason}",
            _INDEX.sub("*", node.module) if others else node.module,
            node.source.rsplit("/", 1)[-1],
        )
    return table


def _alike(nodes: Iterable[NodeRecord]) -> Iterable[list[NodeRecord]]:
    """The rows of the table: operations that differ in nothing but the number of their layer share one."""
    rows: dict[tuple[object, ...], list[NodeRecord]] = {}
    seen: Counter[tuple[object, ...]] = Counter()
    for node in nodes:
        shown = (node.direction, node.op, _reads(node), node.output, node.rule, node.reason, node.source)
        # The second of two in one module is another row: a layer's gradient of its weight and of its input.
        seen[node.module, shown] += 1
        rows.setdefault((_INDEX.sub("*", node.module), shown, seen[node.module, shown]), []).append(node)
    return rows.values()


def _reads(node: NodeRecord) -> str:
    return "/".join(sorted({_SHORT.get(dtype, dtype) for dtype in node.inputs}))
