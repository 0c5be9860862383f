"""What a graph is judged by: its loss, its other outputs, and the gradients that leave it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from mpcompile.analysis.evaluate import evaluate
from mpcompile.graph_inputs import gradient_outputs
from mpcompile.passes.graph import (
    aten,
    dtype_of,
    is_cast,
    is_getitem,
    is_partial_view,
    is_view,
    output_of,
    packet_name,
    parameter_name,
    tensor,
)


@dataclass(frozen=True, slots=True)
class Result:
    """One floating-point value that leaves a graph."""

    name: str
    """``output:0``, or ``grad:layers.0.weight``."""
    node: fx.Node
    was: fx.Node
    """The same result of the graph before the passes."""
    is_gradient: bool
    tangent: str
    """Name of the input that is the gradient of this output, or ``""``."""


def results_of(before: fx.GraphModule, after: fx.GraphModule) -> list[Result]:
    """The floating-point results of a graph; what loss scaling adds for itself is none of them."""
    gradients = dict(gradient_outputs(after))
    names = _input_names(after)
    tangents = _tangents(after)
    old, new = _outputs(before), _outputs(after)
    descriptions = output_of(after).meta.get("desc") or (None,) * len(new)
    found = []
    for index, (node, was) in enumerate(zip(new, old, strict=True)):
        dtype = dtype_of(node)
        if was is None or dtype is None or not dtype.is_floating_point:
            continue
        name = f"grad:{names.get(gradients[index], node.name)}" if index in gradients else f"output:{index}"
        found.append(Result(name, node, was, index in gradients, tangents.get(str(descriptions[index]), "")))
    return found


def _outputs(gm: fx.GraphModule) -> list[Any]:
    (values,) = output_of(gm).args
    return list(values) if isinstance(values, (list, tuple)) else [values]


def _input_names(gm: fx.GraphModule) -> dict[int, str]:
    """Name of every input of the model's graph by its position: the parameter's, or the placeholder's."""
    names = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        position = getattr(node.meta.get("desc"), "idx", None)
        if position is not None:
            names[position] = parameter_name(node) or node.name
    return names


def _tangents(gm: fx.GraphModule) -> dict[str, str]:
    """Name of the tangent of every output, by the output's description."""
    descriptions = ((node.name, node.meta.get("desc")) for node in gm.graph.find_nodes(op="placeholder"))
    return {str(desc.output): name for name, desc in descriptions if hasattr(desc, "output")}


def loss_scale_input(gm: fx.GraphModule) -> str:
    """Name of the input that holds the loss scale, or ``""``."""
    inverse = [node for node in gm.graph.find_nodes(op="call_function", target=aten.reciprocal.default)]
    names = [node.args[0].name for node in inverse if node.name == "inverse_scale"]
    return str(names[0]) if names else ""


_SUMS = frozenset("sum mm bmm convolution_backward _unsafe_masked_index_put_accumulate index_put".split())


def size_of(result: Result, values: Mapping[str, Any]) -> float:
    """The norm of a gradient, or, where larger, the norm it would have did its terms not cancel.

    The gradient of a bias in front of a batch norm is a sum of terms that is zero but for rounding: an error relative
    to zero says nothing. Of terms with random signs a sum has about the root of the sum of their squares.
    """
    size = float(values[result.node.name].norm())
    node, factor = _producer(result.node, values)
    index = 0
    if is_getitem(node):
        index = int(node.args[1])  # type: ignore[arg-type]
        node = node.all_input_nodes[0]
    if node.op != "call_function" or packet_name(node.target) not in _SUMS:
        return size
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: _squared(values[source.name]))
    terms = evaluate(node, args, kwargs, torch.float64)
    terms = terms if isinstance(terms, Tensor) else terms[index]
    return max(size, float(terms.clamp_min(0).sum().sqrt()) * factor)


def _squared(value: Any) -> Any:
    return value.square() if isinstance(value, Tensor) and value.is_floating_point() else value


def _producer(node: fx.Node, values: Mapping[str, Any]) -> tuple[fx.Node, float]:
    """What computes a value that is then viewed, cast and multiplied by a number: with that number."""
    factor = 1.0
    while node.op == "call_function":
        if is_view(node) or is_partial_view(node) or is_cast(node):
            node = node.all_input_nodes[0]
        elif node.target is aten.mul.Tensor and _is_number(node.args[1]):
            factor *= abs(float(values[str(node.args[1])]))
            node = node.all_input_nodes[0]
        else:
            break
    return node, factor


def _is_number(node: Any) -> bool:
    value = tensor(node)
    return value is not None and value.dim() == 0
