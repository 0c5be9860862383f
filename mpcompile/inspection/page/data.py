"""What the HTML page reads: the records of a report, packed."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpcompile.inspection.report import GraphReport, NodeRecord, Report, ValueRecord
from mpcompile.inspection.rollup import roll_up


def page_data(report: Report) -> dict[str, Any]:
    """The data of the page. Text that recurs (modules, reasons, lines) is written once, and referred to by position."""
    texts = _Texts()
    graphs = [_graph(report, graph, texts) for graph in report.graphs]
    return {
        "dtype": report.dtype,
        "preset": report.preset,
        "summary": report.summary().splitlines(),
        "texts": list(texts.positions),
        "graphs": graphs,
    }


class _Texts:
    """Every text with its position."""

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.positions.setdefault(text, len(self.positions))


def _graph(report: Report, graph: GraphReport, texts: _Texts) -> dict[str, Any]:
    rollups = roll_up(dataclasses.replace(report, graphs=(graph,), modules=()))
    position = {value.name: index for index, value in enumerate(graph.values)}
    decisions = {node.name: node for node in graph.nodes}
    parameters = {cast.name: cast.parameter for cast in graph.casts}
    return {
        "modules": [dataclasses.asdict(rollup) for rollup in rollups.values()],
        "nodes": [
            [
                *_value(value, position, texts),
                texts(parameters.get(value.name, "")),
                _decision(decisions.get(value.name), texts),
            ]
            for value in graph.values
        ],
    }


def _value(value: ValueRecord, position: dict[str, int], texts: _Texts) -> list[Any]:
    """The fields in the order of ``VALUE_FIELDS`` in model.js."""
    return [
        value.name,
        texts(value.kind),
        texts(value.op),
        texts(value.dtype),
        list(value.shape),
        value.bytes,
        # What a narrowed report leaves out is known by name only.
        [position.get(name, name) for name in value.reads],
        texts(value.module),
        texts(value.direction),
        int(value.rounds),
        value.saved_bytes,
        texts(value.note),
    ]


def _decision(node: NodeRecord | None, texts: _Texts) -> list[Any] | None:
    """The fields in the order of ``DECISION_FIELDS`` in model.js."""
    if node is None:
        return None
    fields = (node.user_op, node.op_class, node.precision, node.rule, node.reason, node.source)
    return [*map(texts, fields), [texts(dtype) for dtype in node.inputs]]
