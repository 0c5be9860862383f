"""The first value of a graph that is not finite, what made it so, and the rule that would prevent it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from mpcompile.analysis.adjoint import passes_through
from mpcompile.analysis.evaluate import Values, floating, run
from mpcompile.analysis.terminal import where
from mpcompile.passes.graph import (
    CAST,
    LOW_DTYPES,
    dtype_of,
    is_backward,
    is_cast,
    module_path,
    op_name,
    output_of,
    packet_name,
    parameter_name,
    source_line,
    user_op_name,
)
from mpcompile.passes.op_classes import OpClass, classify


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Where a graph stops being finite."""

    name: str
    """Name of the operation, or of the graph's input that was not finite already."""
    op: str
    """Operator in the graph; ``placeholder`` for an input."""
    user_op: str
    """Operator the model called: for the rounding of an operand, that of the operation it is rounded for."""
    module: str
    source: str
    direction: str
    """``forward`` or ``backward``."""
    is_rounding: bool
    """Whether it is the rounding of an operand to a 16-bit type."""
    dtype: str
    what: str
    """``inf`` or ``nan``."""
    elements: int
    """How many elements are not finite."""
    count: int
    """How many elements there are."""
    inputs: tuple[str, ...]
    """Name, dtype and range of what the operation read."""
    finite_in_fp32: bool
    """Whether the value is finite where all of the graph computes in fp32."""
    largest_in_fp32: float
    """Its largest magnitude there."""
    rule: str
    """The ``fp32`` rule that keeps it in fp32, or ``""`` where none would help."""
    loss_scale: float | None
    """The loss scale of the run; None where nothing is scaled."""
    finite_at: float | None = None
    """The largest loss scale at which all gradients are finite; None: not known, or none."""

    def __str__(self) -> str:
        return "\n".join(_sentences(self))


def _sentences(found: NonFinite) -> list[str]:
    if found.op == "placeholder":
        lines = [f"{found.name}, which enters {found.direction}, is not finite already ({_share(found)})."]
        return [*lines, "What comes before the compiled graph made it so: the data, the loss, or the parameters."]
    place = where(found.user_op, found.module, found.source)
    rounding = f"the rounding to {found.dtype} for " if found.is_rounding else ""
    lines = [
        f"The first value of {found.direction} that is not finite is {found.name}: {rounding}{place}, {_share(found)}.",
        f"  It reads {'; '.join(found.inputs) or 'no floating-point value'}.",
    ]
    if not found.finite_in_fp32:
        return [
            *lines,
            "  It is not finite in fp32 either: no precision rule helps; the model or its data must change.",
        ]
    limit = f", beyond {found.dtype}'s {torch.finfo(getattr(torch, found.dtype)).max:g}"
    beyond = limit if found.largest_in_fp32 > torch.finfo(getattr(torch, found.dtype)).max else ""
    lines.append(f"  In fp32 it is finite, at most {found.largest_in_fp32:.3g}{beyond}.")
    if found.finite_at is not None:
        lines.append(
            f"  That is at a loss scale of {found.loss_scale:g}. At {found.finite_at:g} every gradient is finite: "
            "training skips steps until the scale has fallen there."
        )
    if found.rule:
        lines.append(f"  options={{'fp32': [{found.rule!r}]}} computes it in fp32.")
    else:
        lines.append(
            "  What it reads was rounded to 16 bits before: keep that in fp32, or the model's own cast out of it."
        )
    return lines


def _share(found: NonFinite) -> str:
    return f"{found.elements} of {found.count} elements {found.what}"


class Tracker:
    """Follows infinities and NaNs through a graph, from the operation that made them."""

    def __init__(self) -> None:
        self._infinite: set[fx.Node] = set()
        self._undefined: set[fx.Node] = set()
        self._origin: dict[fx.Node, fx.Node] = {}
        self.values: Values = {}
        """Of the operations found so far and of what they read."""

    def see(self, node: fx.Node, value: Any, given: Mapping[str, Any]) -> None:
        """Look at the value of one node, and at those of the nodes it reads, by name.

        An infinity is new where everything read is finite and no argument is an infinite number itself (a mask); a
        NaN is new where nothing read is one.
        """
        tensors = [tensor for tensor in floating(value) if tensor is not None]
        if all(bool(tensor.isfinite().all()) for tensor in tensors):
            return
        undefined = any(bool(tensor.isnan().any()) for tensor in tensors)
        sources = node.all_input_nodes
        self._infinite.add(node)
        if undefined:
            self._undefined.add(node)
        inherited = next((self._origin[source] for source in sources if source in self._origin), None)
        literal = any(
            isinstance(leaf, float) and not math.isfinite(leaf) for leaf in tree_leaves((node.args, node.kwargs))
        )
        is_new = not any(source in self._infinite for source in sources) and not literal
        if inherited is not None:
            self._origin[node] = inherited
        elif is_new or (undefined and not any(source in self._undefined for source in sources)):
            self._origin[node] = node
            self.values.update({node.name: value, **given})

    def origin(self, gm: fx.GraphModule) -> fx.Node | None:
        """The first operation whose infinities or NaNs reach an output of the graph; None where none do.

        One that is masked or clamped away later is no fault.
        """
        found = {self._origin[node] for node in output_of(gm).all_input_nodes if node in self._origin}
        # The gradients of outputs are inputs of a joint graph, but backward begins with them.
        return next((node for node in sorted(gm.graph.nodes, key=is_backward) if node in found), None)


def track(gm: fx.GraphModule, values: Mapping[str, Any]) -> Tracker:
    """Follow infinities and NaNs through the ``values`` of all nodes of a graph."""
    tracker = Tracker()
    for node in gm.graph.nodes:
        if node.op != "output":
            tracker.see(node, values[node.name], {source.name: values[source.name] for source in node.all_input_nodes})
    return tracker


def explain_origin(
    gm: fx.GraphModule, node: fx.Node, values: Mapping[str, Any], inputs: Mapping[str, Any], draws: Values, scale: str
) -> NonFinite:
    """What is to be said of ``node``, where a graph stops being finite.

    ``values``: of the node and what it reads; ``inputs``: of the graph's placeholders; ``draws``: its random numbers;
    ``scale``: name of the placeholder that is the loss scale, or ``""``.
    """
    tensors = [tensor for tensor in floating(values[node.name]) if tensor is not None]
    single = [t for t in floating(run(gm, inputs, torch.float32, draws)[node.name]) if t is not None]
    finite = all(bool(tensor.isfinite().all()) for tensor in single)
    is_input = node.op == "placeholder"
    computes = _computes(node)
    return NonFinite(
        name=(parameter_name(node) or _spelled(node)) if is_input else node.name,
        op=op_name(node),
        user_op=user_op_name(computes),
        module=module_path(computes),
        source=source_line(computes),
        direction="backward" if is_backward(node) else "forward",
        is_rounding=computes is not node,
        dtype=str(tensors[0].dtype)[6:],
        what="nan" if any(bool(tensor.isnan().any()) for tensor in tensors) else "inf",
        elements=sum(int((~tensor.isfinite()).sum()) for tensor in tensors),
        count=sum(tensor.numel() for tensor in tensors),
        inputs=tuple(_ranges(node, values)),
        finite_in_fp32=finite,
        largest_in_fp32=max((float(tensor.abs().max()) for tensor in single if tensor.numel()), default=0.0),
        rule=_rule(computes) if finite and not is_input else "",
        loss_scale=float(inputs[scale]) if scale else None,
    )


def _spelled(node: fx.Node) -> str:
    if node.name.startswith("tangents"):
        return "The gradient of an output"
    return f"Input {node.name}"


def _ranges(node: fx.Node, values: Mapping[str, Any]) -> Sequence[str]:
    texts = []
    for source in node.all_input_nodes:
        value = values[source.name]
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            name = parameter_name(source) or source.name
            texts.append(f"{name} ({str(value.dtype)[6:]} from {float(value.min()):.3g} to {float(value.max()):.3g})")
    return texts


def _computes(node: fx.Node) -> fx.Node:
    """The operation that an operand is rounded for; the node itself where it is no such rounding."""
    if not (is_cast(node) and dtype_of(node) in LOW_DTYPES):
        return node
    return next((reader for reader in _final_readers(node) if classify(reader.target) is OpClass.LOW), node)


def _rule(computes: fx.Node) -> str:
    if classify(computes.target) is not OpClass.LOW and CAST not in computes.meta:
        return ""
    return module_path(computes) or f"op:{packet_name(computes.target)}"


def _final_readers(node: fx.Node) -> list[fx.Node]:
    found = []
    for user in node.users:
        found += _final_readers(user) if passes_through(user) else [user]
    return found
