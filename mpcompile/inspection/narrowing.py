"""The part of a report that is about some of the modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from mpcompile.inspection.report import GraphReport, Report
from mpcompile.inspection.text import defined_name
from mpcompile.passes.result import PassResult
from mpcompile.passes.rules import parse_rule, require_match


def narrow(report: Report, pattern: str) -> Report:
    """Keep what belongs to modules that match ``pattern``, as a rule of the options does, or is inside them."""
    rule = parse_rule(pattern)
    if rule.kind != "module" or rule.phase:
        raise ValueError(f"{pattern!r} is no module; write a module path such as 'layers.3' or 'layers.*.norm'.")
    require_match(rule, report.rollups)
    kept = {path for path in report.rollups if rule.matches(path)}
    graphs = tuple(_part(graph, kept) for graph in report.graphs)
    return dataclasses.replace(report, graphs=tuple(graph for graph in graphs if graph.values or graph.nodes))


def _part(graph: GraphReport, modules: Collection[str]) -> GraphReport:
    values = tuple(value for value in graph.values if value.module in modules)
    names = {value.name for value in values}
    return dataclasses.replace(
        graph,
        nodes=tuple(node for node in graph.nodes if node.module in modules),
        casts=tuple(cast for cast in graph.casts if cast.module in modules),
        results=tuple(
            PassResult(result.name, tuple(change for change in result.changes if change.node in names))
            for result in graph.results
        ),
        before=_lines(graph, graph.before, modules),
        after=_lines(graph, graph.after, modules),
        values=values,
    )


def _lines(graph: GraphReport, text: str, modules: Collection[str]) -> str:
    return "\n".join(line for module, _, line in located_lines(graph, text) if module in modules)


def located_lines(graph: GraphReport, text: str) -> Iterator[tuple[str, str, str]]:
    """Module, direction and text of every line of a graph; what is gone from the graph is where its neighbours are."""
    places = {value.name: (value.module, value.direction) for value in graph.values}
    module, direction = "", "forward"
    for line in text.splitlines():
        name = defined_name(line)
        if name is None:
            continue
        module, direction = places.get(name, (module, direction))
        yield module, direction, line
