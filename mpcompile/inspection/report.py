"""The report of a compiled graph, as data: every operation with its precision and the rule that decided it.

``Recorder`` collects graphs while the passes run (two cheap copies, nothing else); the report is made of them when
somebody asks. How a report looks in a terminal is in ``terminal``.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.inspection.text import graph_text
from mpcompile.passes.compute_plan import Decision, plan_compute
from mpcompile.passes.graph import (
    CAST,
    dtype_of,
    is_backward,
    module_path,
    op_name,
    parameter_name,
    source_line,
    subgraphs,
    tensor,
    user_op_name,
)
from mpcompile.passes.op_classes import OpClass, classify
from mpcompile.passes.policy import Policy
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
    """Who decided: ``user``, ``fp32 rule``, ``low rule``, ``shape`` or ``class``."""
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
        return json.dumps({"dtype": self.dtype, "graphs": [dataclasses.asdict(g) for g in self.graphs]})

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what ``to_json`` wrote."""
        data = json.loads(text)
        return cls(data["dtype"], tuple(_graph_from(graph) for graph in data["graphs"]))


def _graph_from(data: dict[str, Any]) -> GraphReport:
    nodes = (NodeRecord(**{**node, "inputs": tuple(node["inputs"])}) for node in data["nodes"])
    results = (
        PassResult(result["name"], tuple(Change(**change) for change in result["changes"]))
        for result in data["results"]
    )
    casts = (CastRecord(**cast) for cast in data["casts"])
    return GraphReport(tuple(nodes), tuple(casts), tuple(results), data["before"], data["after"])


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """Copies of one graph before and after the passes."""

    before: fx.GraphModule
    after: fx.GraphModule
    results: tuple[PassResult, ...]
    in_backward: bool = False
    """Whether it is the body of a higher-order op that backward calls; its nodes do not say so themselves."""


class Recorder:
    """Collects what the passes do to the graphs of one Dynamo graph."""

    def __init__(self, policy: Policy, earlier: tuple[PassResult, ...]) -> None:
        self._policy = policy
        self._earlier = earlier  # what the passes before autograd changed
        self._records: list[GraphRecord] = []

    @property
    def is_empty(self) -> bool:
        """Whether no pass ran here: the compiled code came from the cache."""
        return not self._records

    def add(self, before: fx.GraphModule, after: fx.GraphModule, results: tuple[PassResult, ...]) -> None:
        """Keep a graph: a copy taken before the passes, and the graph as it is now."""
        self._add(GraphRecord(before, snapshot(after), (*self._earlier, *results)))

    def _add(self, record: GraphRecord) -> None:
        self._records.append(record)
        for (name, before), (_, after) in zip(subgraphs(record.before), subgraphs(record.after), strict=True):
            callers = [user for node in _readers_of(record.after, name) for user in node.users]
            in_backward = record.in_backward or any(map(is_backward, callers))
            self._add(GraphRecord(before, after, (), in_backward))

    def report(self) -> Report:
        """Make the report of what was collected."""
        graphs = [self._graph(record) for record in self._records]
        dtype = str(self._policy.dtype).removeprefix("torch.")
        modules = tuple((record.before, record.after) for record in self._records)
        return Report(dtype, tuple(graphs), modules)

    def _graph(self, record: GraphRecord) -> GraphReport:
        plan = plan_compute(record.before, self._policy)
        after = {node.name: node for node in record.after.graph.nodes}
        before = [(node.name, decision) for node, decision in plan.items() if node.name in after]
        nodes = [self._node(after[name], decision, record.in_backward) for name, decision in before]
        casts = [self._cast(node, record.in_backward) for node in after.values() if CAST in node.meta]
        return GraphReport(
            tuple(nodes), tuple(casts), record.results, graph_text(record.before), graph_text(record.after)
        )

    def _node(self, node: fx.Node, decision: Decision, in_backward: bool) -> NodeRecord:
        return NodeRecord(
            name=node.name,
            op=op_name(node),
            user_op=user_op_name(node),
            op_class=classify(node.target).value,
            inputs=tuple(_dtypes(node.all_input_nodes)),
            output=next(_dtypes([node]), ""),
            precision=decision.precision,
            rule=decision.rule,
            reason=decision.reason,
            module=module_path(node),
            source=source_line(node),
            direction=_direction(node, in_backward),
        )

    def _cast(self, node: fx.Node, in_backward: bool) -> CastRecord:
        value = node.args[0]
        assert isinstance(value, fx.Node)
        return CastRecord(
            name=node.name,
            value=value.name,
            before=next(_dtypes([value]), ""),
            after=next(_dtypes([node]), ""),
            bytes=_bytes(value, node),
            parameter=parameter_name(value),
            module=module_path(node),
            direction=_direction(node, in_backward),
        )

    @property
    def is_fp32(self) -> bool:
        """Whether the policy leaves every graph as it is."""
        return self._policy.is_fp32

    @property
    def has_weights(self) -> bool:
        """Whether a graph reads a parameter with two or more dimensions."""
        return any(
            parameter_name(node) and (value := tensor(node)) is not None and value.dim() >= 2
            for record in self._records
            for node in record.before.graph.find_nodes(op="placeholder")
        )

    def reasons_for_nothing_low(self) -> str | None:
        """Why no operation computes low; None where one does."""
        if any(self._is_low(node) for record in self._records for node in record.after.graph.nodes):
            return None
        reasons = Counter(
            decision.reason
            for record in self._records
            for node, decision in plan_compute(record.before, self._policy).items()
            if classify(node.target) is OpClass.LOW
        )
        if not reasons:
            return "it has no matmul, convolution or attention"
        return "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())

    @staticmethod
    def _is_low(node: fx.Node) -> bool:
        low = (torch.bfloat16, torch.float16)
        return classify(node.target) is OpClass.LOW and any(dtype_of(source) in low for source in node.all_input_nodes)


def snapshot(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, and of the bodies of its higher-order ops, with their metadata."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].name = node.name
    copy = fx.GraphModule(gm, graph)
    for name, body in subgraphs(gm):
        setattr(copy, name, snapshot(body))
    return copy


def _readers_of(gm: fx.GraphModule, attribute: str) -> list[fx.Node]:
    return [node for node in gm.graph.find_nodes(op="get_attr") if node.target == attribute]


def _direction(node: fx.Node, in_backward: bool) -> str:
    return "backward" if in_backward or is_backward(node) else "forward"


def _dtypes(nodes: Iterable[fx.Node]) -> Iterator[str]:
    for node in nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                yield str(value.dtype).removeprefix("torch.")


def _bytes(source: fx.Node, target: fx.Node) -> int | None:
    total = 0
    for node in (source, target):
        value = tensor(node)
        count = value.numel() if value is not None else 0
        if not isinstance(count, int) or value is None:
            return None
        total += count * value.itemsize
    return total
