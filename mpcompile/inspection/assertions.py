"""``assert_precision``: what a user's test says about the precision of a module or an operator."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mpcompile.inspection.registry import reports
from mpcompile.inspection.report import GraphReport, NodeRecord, Report
from mpcompile.passes.op_classes import OpClass
from mpcompile.passes.rules import Rule, op_names, parse_rule, require_match

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DIRECTIONS = ("forward", "backward")
_ROWS = 12
_WIDTH = 120
_PARAMETER = re.compile(r"^(?:parameter|low copy of) ([^ ,]+)")
"""How the note of a graph's input begins where it is a parameter."""


def assert_precision(
    report: Report | Callable[..., Any],
    pattern: str,
    dtype: torch.dtype,
    *,
    direction: str | None = None,
) -> None:
    """Assert that what ``pattern`` names computes in ``dtype``, forward and backward or in one ``direction``.

    ``report`` is a ``Report``, or what ``torch.compile(..., backend="mixprec")`` returned, after a call. ``pattern`` is
    a rule as in the options: a module path (``"layers.*.norm"``, everything inside included), an operator
    (``"op:softmax"``, ``"op:linear"``, also where it was decomposed) or a parameter (``"param:*.bias"``: what reads
    it). ``dtype`` is ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``.

    Counted are operations that compute with floating-point values; those that move, select or cast them are not. Of
    what is asked for in 16 bits, only those count that can gain from it: matmuls, convolutions, attention, and what a
    ``low`` rule covers. Sums and elementwise operations beside them compute in fp32 as always; where there is nothing
    else, they are what differs. See ``computed_in`` for what an operation computes in.

    Raises ``AssertionError`` with a table of the operations that differ and who decided them; ``ValueError`` where
    nothing matches, naming the nearest names, and for a pattern, dtype or direction that is none; ``LookupError``
    where nothing was compiled yet.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}; got {dtype!r}.")
    if direction not in (None, *_DIRECTIONS):
        raise ValueError(f"direction must be 'forward', 'backward' or None for both; got {direction!r}.")
    rule = _rule(pattern)
    matching = _matching(_graphs(report), rule, direction)
    wanted = _name(dtype)
    counted = _counted(matching, wanted)
    if not counted:
        moved = ", ".join(sorted({node.name for node in matching})[:4])
        raise ValueError(f"{pattern!r} matches only operations that move, select or cast values ({moved}, ...).")
    differing = [node for node in counted if computed_in(node) != wanted]
    if differing:
        raise AssertionError(_complaint(pattern, wanted, differing, len(counted)))


def computed_in(node: NodeRecord) -> str:
    """The dtype that an operation computes in (``"bfloat16"``), or ``""`` where it computes nothing.

    A matmul, convolution or attention: the narrowest of the operands it reads, whatever its result is stored in, since
    it rounds nothing more (products are accumulated in fp32). A custom operator: the narrowest it reads or makes. Any
    other: the dtype of its result, which is the one torch promotes its operands to. An operand that was stored low and
    widened again is read in fp32.
    """
    if node.op_class == OpClass.EXACT.value or _has_body(node):
        return ""
    read = _floating(node.inputs)
    made = _floating((node.output,))
    if not read:
        return ""
    if node.op_class == OpClass.LOW.value:
        dtype = min(read, key=_bits)
    elif node.op_class == OpClass.OPAQUE.value:
        dtype = min((*read, *made), key=_bits)
    else:
        dtype = made[0] if made else functools.reduce(torch.promote_types, read)
    return _name(dtype)


def _has_body(node: NodeRecord) -> bool:
    """Whether an operation is of higher order (cond, checkpoint): its body, a graph of its own, computes."""
    return node.op_class == OpClass.OPAQUE.value and "." not in node.op


def _floating(names: Iterable[str]) -> list[torch.dtype]:
    dtypes = (getattr(torch, name, None) for name in names)
    return [dtype for dtype in dtypes if isinstance(dtype, torch.dtype) and dtype.is_floating_point]


def _bits(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rule(pattern: str) -> Rule:
    rule = parse_rule(pattern)
    if rule.phase:
        raise ValueError(f"Pattern {pattern!r} has a phase; give direction='forward' or direction='backward' instead.")
    return rule


def _graphs(report: Report | Callable[..., Any]) -> tuple[GraphReport, ...]:
    if isinstance(report, Report):
        return report.graphs
    found = reports(report)
    if not found:
        raise LookupError("Nothing was compiled yet; call the compiled model once, or use mpcompile.explain.")
    return tuple(graph for each in found for graph in each.graphs)


def _matching(graphs: Sequence[GraphReport], rule: Rule, direction: str | None) -> list[NodeRecord]:
    named = [(node, names) for graph in graphs for node, names in _named(graph, rule.kind)]
    require_match(rule, (name for _, names in named for name in names))
    matching = [node for node, names in named if any(map(rule.matches, names))]
    there = [node for node in matching if direction in (None, node.direction)]
    if not there:
        raise ValueError(f"{str(rule)!r} matches no operation in {direction}, only {len(matching)} in the other.")
    return there


def _named(graph: GraphReport, kind: str) -> Iterator[tuple[NodeRecord, set[str]]]:
    """Every operation, with the names under which a rule of this kind finds it."""
    read = _parameters_read(graph) if kind == "param" else {}
    for node in graph.nodes:
        if kind == "module":
            yield node, {node.module.rsplit(".", depth)[0] for depth in range(node.module.count(".") + 1)}
        elif kind == "op":
            yield node, op_names(_packet(node.op)) | op_names(_packet(node.user_op)) | {node.call}
        else:
            yield node, read.get(node.name, set())


def _parameters_read(graph: GraphReport) -> dict[str, set[str]]:
    """The names of the parameters that each operation reads, seen through views and casts."""
    held: dict[str, set[str]] = {}
    read: dict[str, set[str]] = {}
    for value in graph.values:
        if value.kind == "input":
            held[value.name] = set(_PARAMETER.findall(value.note))
        elif value.kind in ("view", "cast"):
            held[value.name] = set().union(*(held.get(source, set()) for source in value.reads))
        else:
            read[value.name] = set().union(*(held.get(source, set()) for source in value.reads))
    return read


def _packet(op: str) -> str:
    """``mm`` for ``aten.mm.default``, ``mylib::op`` for ``mylib.op.default``."""
    namespace, _, name = op.rpartition(".")[0].partition(".")
    if not name:
        return op
    return name if namespace in ("aten", "prims") else f"{namespace}::{name}"


def _counted(matching: Sequence[NodeRecord], wanted: str) -> list[NodeRecord]:
    computing = [node for node in matching if computed_in(node)]
    if wanted == "float32":
        return computing
    gaining = [node for node in computing if node.op_class == OpClass.LOW.value or node.precision == "low"]
    return gaining or computing


def _complaint(pattern: str, wanted: str, differing: Sequence[NodeRecord], count: int) -> str:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("", "node", "op", "computes in", "decided by", "module", "source"):
        table.add_column(title, overflow="fold")
    for node in differing[:_ROWS]:
        table.add_row(
            "fw" if node.direction == "forward" else "bw",
            node.name,
            _packet(node.user_op),
            computed_in(node),
            f"{node.rule}: {node.reason}",
            node.module,
            node.source.rsplit("/", 1)[-1],
        )
    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None, markup=False, highlight=False).print(table)
    more = f"\n... and {len(differing) - _ROWS} more" if len(differing) > _ROWS else ""
    head = f"{len(differing)} of {count} operations of {pattern!r} do not compute in {wanted}:"
    return f"{head}\n{file.getvalue().rstrip()}{more}"
