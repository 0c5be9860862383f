"""The report of a compiled graph, as data: every operation with its precision and the rule that decided it.

``recorder`` makes it, ``terminal`` shows it, ``store`` keeps it for other processes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from torch import fx

from mpcompile.passes.op_classes import OpClass
from mpcompile.passes.result import Change, PassResult


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One operation of the graph as it runs."""

    name: str
    op: str
    """Operator in the graph, e.g. ``aten.addmm.default``."""
    user_op: str
    """Operator the model called, before decomposition, e.g. ``aten.native_layer_norm.default``."""
    op_class: str
    """``low``, ``fp32``, ``follow``, ``exact`` or ``opaque``."""
    inputs: tuple[str, ...]
    """Dtypes of the tensor operands as they are read."""
    output: str
    """Dtype of the (first) result."""
    precision: str
    """``low``, ``fp32`` or ``as traced``."""
    rule: str
    """Who decided: ``user``, ``fp32 rule``, ``low rule``, ``shape``, ``range guard`` or ``class``."""
    reason: str
    module: str
    """Module path, from the compiled model's root."""
    source: str
    """``file:line`` of the model's code."""
    direction: str
    """``forward`` or ``backward``."""


@dataclass(frozen=True, slots=True)
class CastRecord:
    """One cast that the passes put in."""

    name: str
    value: str
    """Name of the value that is cast."""
    before: str
    after: str
    bytes: int | None
    """Bytes read plus bytes written when it stands alone; fused into a kernel it costs fewer. None: dynamic shape."""
    parameter: str
    """Name of the parameter that is cast, or ``""``."""
    module: str
    direction: str


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One graph: forward and backward together, or an inference graph, or the body of a higher-order op."""

    nodes: tuple[NodeRecord, ...]
    casts: tuple[CastRecord, ...]
    results: tuple[PassResult, ...]
    before: str
    """The graph as it came from autograd, as text with dtypes."""
    after: str
    """The graph as it was handed on."""


@dataclass(frozen=True)
class Report:
    """What mixprec decided for a compiled model, or for one of its graphs."""

    dtype: str
    """The low type in use."""
    graphs: tuple[GraphReport, ...]
    modules: tuple[tuple[fx.GraphModule, fx.GraphModule], ...] = dataclasses.field(
        default=(), compare=False, repr=False
    )
    """The graphs before and after, as FX; empty for a report that came from the compile cache."""
    preset: str = "default"
    """The preset of the policy."""

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """The operations of all graphs."""
        return tuple(node for graph in self.graphs for node in graph.nodes)

    @property
    def casts(self) -> tuple[CastRecord, ...]:
        """The inserted casts of all graphs."""
        return tuple(cast for graph in self.graphs for cast in graph.casts)

    def matmuls(self) -> tuple[NodeRecord, ...]:
        """The operations that may run low: matmuls, convolutions, attention."""
        return tuple(node for node in self.nodes if node.op_class == OpClass.LOW.value)

    def summary(self) -> str:
        """A few lines: how much runs low, what does not and why, the casts and their bytes."""
        from mpcompile.inspection.terminal import summary

        return summary(self)

    def __str__(self) -> str:
        from mpcompile.inspection.terminal import render

        return render(self)

    def to_json(self) -> str:
        """The report without the FX graphs; ``Report.from_json`` reads it back."""
        return json.dumps(
            {"dtype": self.dtype, "preset": self.preset, "graphs": [dataclasses.asdict(g) for g in self.graphs]}
        )

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what ``to_json`` wrote."""
        data = json.loads(text)
        return cls(data["dtype"], tuple(map(_graph_from, data["graphs"])), preset=data["preset"])


def _graph_from(data: dict[str, Any]) -> GraphReport:
    nodes = (NodeRecord(**{**node, "inputs": tuple(node["inputs"])}) for node in data["nodes"])
    results = (
        PassResult(result["name"], tuple(Change(**change) for change in result["changes"]))
        for result in data["results"]
    )
    casts = (CastRecord(**cast) for cast in data["casts"])
    return GraphReport(tuple(nodes), tuple(casts), tuple(results), data["before"], data["after"])
