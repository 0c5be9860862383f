"""Collect what the passes do while a model compiles, and make the report of it when somebody asks.

Compiling pays for two copies of each graph and nothing else.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from mpcompile.inspection.report import Report
from mpcompile.inspection.snapshot import snapshot
from mpcompile.inspection.transcription import GraphRecord, operands, transcribe
from mpcompile.passes.compute_plan import plan_compute
from mpcompile.passes.graph import dtype_of, is_backward, parameter_name, subgraphs, tensor
from mpcompile.passes.op_classes import OpClass, classify
from mpcompile.passes.policy import Policy
from mpcompile.passes.result import PassResult


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
        self._add(GraphRecord(before, snapshot(after), self._earlier, results))

    def _add(self, record: GraphRecord) -> None:
        self._records.append(record)
        for (name, before), (_, after) in zip(subgraphs(record.before), subgraphs(record.after), strict=True):
            callers = [user for node in _readers_of(record.after, name) for user in node.users]
            in_backward = record.in_backward or any(map(is_backward, callers))
            self._add(GraphRecord(before, after, (), (), in_backward))

    def report(self) -> Report:
        """Make the report of what was collected."""
        graphs = [transcribe(record, self._policy) for record in self._records]
        dtype = str(self._policy.dtype).removeprefix("torch.")
        modules = tuple((record.before, record.after) for record in self._records)
        return Report(dtype, tuple(graphs), modules, self._policy.preset)

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
        return classify(node.target) is OpClass.LOW and any(dtype_of(source) in low for source in operands(node))


def _readers_of(gm: fx.GraphModule, attribute: str) -> list[fx.Node]:
    return [node for node in gm.graph.find_nodes(op="get_attr") if node.target == attribute]
