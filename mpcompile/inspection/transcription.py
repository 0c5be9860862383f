"""Write down one graph, before and after the passes, as records.

The decisions are made again from the graph before, which is cheap and leaves nothing to carry through the passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from mpcompile.inspection.ends import end_notes, returned_values
from mpcompile.inspection.facts import bytes_in_fp32, dtype_name, first_dtype, first_shape, tensors, total_bytes
from mpcompile.inspection.report import CastRecord, GraphReport, NodeRecord, ValueRecord
from mpcompile.inspection.text import graph_text
from mpcompile.passes.compute_plan import Decision, plan_compute
from mpcompile.passes.exactness import sources
from mpcompile.passes.graph import (
    CAST,
    EXACT,
    KEPT,
    LOW_DTYPES,
    call_name,
    is_backward,
    is_cast,
    is_getitem,
    is_joint,
    is_partial_view,
    is_tuple_view,
    is_view,
    module_path,
    op_name,
    parameter_name,
    source_line,
    source_of_widening,
    user_op_name,
)
from mpcompile.passes.op_classes import OpClass, classify
from mpcompile.passes.policy import Policy
from mpcompile.passes.result import PassResult
from mpcompile.passes.saved_values import predict_partition
from mpcompile.passes.wide_products import WIDE


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """Copies of one graph before and after the passes."""

    before: fx.GraphModule
    after: fx.GraphModule
    earlier: tuple[PassResult, ...]
    """What the passes before autograd changed; they name nodes of another graph."""
    results: tuple[PassResult, ...]
    """What the passes changed here, then in the bodies of higher-order ops."""
    in_backward: bool = False
    """Whether it is the body of a higher-order op that backward calls; its nodes do not say so themselves."""


def transcribe(record: GraphRecord, policy: Policy) -> GraphReport:
    """Make the report of a graph that was rewritten under ``policy``."""
    return _Transcription(record, policy).report()


class _Transcription:
    """One graph being written down."""

    def __init__(self, record: GraphRecord, policy: Policy) -> None:
        self._record = record
        self._low = policy.dtype
        self._after = {node.name: node for node in record.after.graph.nodes}
        plan = plan_compute(record.before, policy)
        self._decisions = {
            node.name: _final(self._after[node.name], decision)
            for node, decision in plan.items()
            if node.name in self._after
        }
        self._notes = _notes(record.results)
        self._end_notes = end_notes(record.after)
        self._saved = {node.name: total_bytes(node) for node in _saved(record.after)}
        self._saved_fp32 = self._saved_in_fp32()

    def report(self) -> GraphReport:
        """All records, in the order of the graph."""
        nodes = list(self._after.values())
        return GraphReport(
            nodes=tuple(self._node(node) for node in nodes if node.name in self._decisions),
            casts=tuple(self._cast(node) for node in nodes if CAST in node.meta),
            results=(*self._record.earlier, *self._record.results),
            before=graph_text(self._record.before),
            after=graph_text(self._record.after),
            values=(*(self._value(node) for node in nodes if node.op != "output"), *self._outputs()),
        )

    def _saved_in_fp32(self) -> dict[str, int | None]:
        """Bytes of what the model in fp32 keeps; what a pass erased is added to what it was made from."""
        # Attention that was cast before autograd is low in the graph before these passes already.
        cast_earlier = any(result.name == "lower_kernels" and result.changed for result in self._record.earlier)
        found: dict[str, int | None] = {}
        for node in _saved(self._record.before):
            size = bytes_in_fp32(node) if cast_earlier else total_bytes(node)
            while node.name not in self._after:
                node = node.all_input_nodes[0]
            before = found.get(node.name, 0)
            found[node.name] = None if size is None or before is None else before + size
        return found

    def _node(self, node: fx.Node) -> NodeRecord:
        decision = self._decisions[node.name]
        return NodeRecord(
            name=node.name,
            op=op_name(node),
            user_op=user_op_name(node),
            op_class=classify(node.target).value,
            inputs=tuple(dtype_name(value) for source in operands(node) for value in tensors(source)),
            output=first_dtype(node),
            precision=decision.precision,
            rule=decision.rule,
            reason=decision.reason,
            module=module_path(node),
            source=source_line(node),
            direction=self._direction(node),
            call=call_name(node),
        )

    def _cast(self, node: fx.Node) -> CastRecord:
        value = node.args[0]
        assert isinstance(value, fx.Node)
        read, written = total_bytes(value), total_bytes(node)
        return CastRecord(
            name=node.name,
            value=value.name,
            before=first_dtype(value),
            after=first_dtype(node),
            bytes=None if read is None or written is None else read + written,
            parameter=parameter_name(value),
            module=self._module(node),
            direction=self._direction(node),
        )

    def _value(self, node: fx.Node) -> ValueRecord:
        return ValueRecord(
            name=node.name,
            kind=self._kind(node),
            op=op_name(node) if node.op == "call_function" else "",
            dtype=first_dtype(node),
            shape=first_shape(node),
            bytes=total_bytes(node),
            reads=tuple(source.name for source in node.all_input_nodes),
            module=self._module(node),
            direction=self._direction(node),
            rounds=self._rounds(node),
            saved_bytes=self._saved.get(node.name, 0),
            saved_bytes_fp32=self._saved_fp32.get(node.name, 0),
            note=self._note(node),
        )

    def _kind(self, node: fx.Node) -> str:
        if node.op != "call_function":
            return "input"
        if CAST in node.meta:
            return "cast"
        if is_view(node) or is_partial_view(node) or is_tuple_view(node) or is_getitem(node):
            return "view"
        return "operation" if node.name in self._decisions else "added"

    def _note(self, node: fx.Node) -> str:
        if node.op != "call_function":
            return self._end_notes.get(node.name, "")
        note = self._notes.get(node.name, "")
        if node.name in self._decisions and note == self._decisions[node.name].reason:
            return ""
        if CAST in node.meta and (not note or parameter_name(node.all_input_nodes[0])):
            source = node.all_input_nodes[0]
            return f"{'low form of' if self._is_low(node) else 'widens'} {parameter_name(source) or source.name}"
        return note

    def _is_low(self, node: fx.Node) -> bool:
        first = next(tensors(node), None)
        return first is not None and first.dtype in LOW_DTYPES

    def _rounds(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not self._is_low(node):
            return False
        if is_cast(node):
            source = node.all_input_nodes[0]
            return EXACT not in node.meta and not self._is_low(source) and sources(source, self._low) != []
        return classify(node.target) in (OpClass.LOW, OpClass.FP32, OpClass.FOLLOW)

    def _outputs(self) -> Iterator[ValueRecord]:
        for position, (value, note, parameter, is_gradient) in enumerate(returned_values(self._record.after)):
            yield ValueRecord(
                name=f"return[{position}]",  # no node can have this name
                kind="output",
                op="",
                dtype=first_dtype(value),
                shape=first_shape(value),
                bytes=total_bytes(value),
                reads=(value.name,),
                module=_owner(parameter),
                direction="backward" if is_gradient else self._direction(value),
                rounds=False,
                saved_bytes=0,
                saved_bytes_fp32=0,
                note=note,
            )

    def _module(self, node: fx.Node) -> str:
        """Path of the module a value belongs to; of a parameter or a cast of one, the module that holds it.

        What flags an overflow is where the gradient is.
        """
        while not module_path(node) and node.op == "call_function" and len(node.all_input_nodes) == 1:
            if CAST not in node.meta and node.name in self._decisions:
                break
            (node,) = node.all_input_nodes
        return module_path(node) or _owner(parameter_name(node))

    def _direction(self, node: fx.Node) -> str:
        return "backward" if self._record.in_backward or is_backward(node) else "forward"


def operands(node: fx.Node) -> list[fx.Node]:
    """What an operation reads; before widening, where low operands were widened for its kernel."""
    if WIDE not in node.meta:
        return node.all_input_nodes
    return [source_of_widening(source) or source for source in node.all_input_nodes]


def _final(node: fx.Node, planned: Decision) -> Decision:
    """What became of a planned decision."""
    return Decision("fp32", "shape", node.meta[KEPT]) if KEPT in node.meta else planned


def _notes(results: Sequence[PassResult]) -> dict[str, str]:
    """The last reason that a pass gave for each node of the graph itself."""
    own: dict[str, PassResult] = {}
    for result in results:
        own.setdefault(result.name, result)  # those of bodies come after, and may name other nodes alike
    return {change.node: change.reason for result in own.values() for change in result.changes}


def _saved(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Every value that forward keeps for backward, inputs apart."""
    if is_joint(gm.graph):
        yield from (node for node in predict_partition(gm.graph).saved if node.op == "call_function")


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]
