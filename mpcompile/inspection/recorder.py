"""Collect what the passes do while a model compiles, and make the report of it when somebody asks.

Compiling pays for two copies of each graph and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.inspection.report import CastRecord, GraphReport, NodeRecord, Report
from mpcompile.inspection.text import graph_text
from mpcompile.passes.compute_plan import Decision, plan_compute
from mpcompile.passes.graph import (
    CAST,
    KEPT,
    dtype_of,
    is_backward,
    module_path,
    op_name,
    parameter_name,
    source_line,
    source_of_widening,
    subgraphs,
    tensor,
    user_op_name,
)
from mpcompile.passes.op_classes import OpClass, classify
from mpcompile.passes.policy import Policy
from mpcompile.passes.result import PassResult
from mpcompile.passes.wide_products import WIDE


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
        return Report(dtype, tuple(graphs), modules, self._policy.preset)

    def _graph(self, record: GraphRecord) -> GraphReport:
        plan = plan_compute(record.before, self._policy)
        after = {node.name: node for node in record.after.graph.nodes}
        kept = [(after[node.name], decision) for node, decision in plan.items() if node.name in after]
        nodes = [self._node(node, _final(node, decision), record.in_backward) for node, decision in kept]
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
            inputs=tuple(_dtypes(_operands(node))),
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
        """Why no operation computes low; None where one does, or where the user decided so."""
        if any(self._is_low(node) for record in self._records for node in record.after.graph.nodes):
            return None
        decisions = [
            decision
            for record in self._records
            for node, decision in plan_compute(record.before, self._policy).items()
            if classify(node.target) is OpClass.LOW
        ]
        if any(decision.rule in ("user", "fp32 rule") for decision in decisions):
            return None
        reasons = Counter(decision.reason for decision in decisions)
        if not reasons:
            return "it has no matmul, convolution or attention after decomposition"
        return "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())

    @staticmethod
    def _is_low(node: fx.Node) -> bool:
        low = (torch.bfloat16, torch.float16)
        return classify(node.target) is OpClass.LOW and any(dtype_of(source) in low for source in _operands(node))


def _final(node: fx.Node, planned: Decision) -> Decision:
    """What became of a planned decision."""
    return Decision("fp32", "shape", node.meta[KEPT]) if KEPT in node.meta else planned


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


def _operands(node: fx.Node) -> list[fx.Node]:
    """What an operation reads; before widening, where low operands were widened for its kernel."""
    if WIDE not in node.meta:
        return node.all_input_nodes
    return [source_of_widening(source) or source for source in node.all_input_nodes]


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
