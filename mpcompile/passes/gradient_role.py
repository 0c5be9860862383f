"""What an operation of a joint graph is for: the forward, the gradient of a weight, or the rest of backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from mpcompile.passes.graph import (
    is_backward,
    is_cast,
    is_getitem,
    is_partial_view,
    is_tuple_view,
    is_view,
    packet_name,
    tensor,
)
from mpcompile.passes.op_classes import OpClass, classify

FORWARD, DGRAD, WGRAD = "forward", "dgrad", "wgrad"

WEIGHT_GRADIENTS = "mixprec_weight_gradients"
"""Key of ``node.meta`` of the output of a joint graph: the positions that are gradients of weights. Where it is
missing, every value of backward that leaves the graph counts as one."""

_PASSES_ON = frozenset("add sub neg sum mean cat stack slice_scatter select_scatter constant_pad_nd".split())
"""Besides views and casts: a weight used twice, broadcast, or stored in pieces has its gradient put together so."""
_SCALES = frozenset(("mul", "div"))
_ADDS_A_PRODUCT = frozenset("addmm baddbmm addbmm addmv".split())


def gradient_roles(graph: fx.Graph) -> dict[fx.Node, str]:
    """The role of every operation: ``"forward"``, ``"dgrad"`` or ``"wgrad"``.

    ``"wgrad"``: a LOW operation of backward (a matmul, say) whose result becomes the gradient of a weight that leaves
    the graph, through nothing but views, casts, sums, additions of gradients and scaling by a factor, and nothing
    else. ``"dgrad"``: every other operation of backward. One that computes both, as a convolution's backward does, is
    ``"dgrad"`` by itself; its results (the ``getitem`` nodes) have their own roles. One walk over the graph.
    """
    leading = _leading_to_weight_gradients(graph)
    return {node: _role(node, leading) for node in graph.nodes if node.op == "call_function"}


def phases(node: fx.Node, roles: Mapping[fx.Node, str]) -> set[str]:
    """The roles of an operation and of each of its results: two for a convolution's whole backward."""
    return {roles[node]} | {roles[user] for user in node.users if is_getitem(user)}


def _role(node: fx.Node, leading: Collection[fx.Node]) -> str:
    if not is_backward(node):
        return FORWARD
    made_by = node.args[0] if is_getitem(node) else node
    assert isinstance(made_by, fx.Node)
    return WGRAD if node in leading and classify(made_by.target) is OpClass.LOW else DGRAD


def _leading_to_weight_gradients(graph: fx.Graph) -> Collection[fx.Node]:
    """Every node that becomes a weight's gradient by moving, adding and scaling alone, and becomes nothing else.

    Nothing else: what flows on through backward may well be summed into the gradient of a bias on its way.
    """
    counted: set[fx.Node] = set()
    others: set[fx.Node] = set()  # leave the graph as something else
    carrying: set[fx.Node] = set()  # make up something that leaves; a comparison of them (an overflow flag) does not
    leading: dict[fx.Node, set[fx.Node]] = {}  # with the operands that it passes on
    for node in reversed(graph.nodes):
        if node.op == "output":
            counted, others = _leaving(node)
            continue
        if not _is_floating(node):
            continue
        readers = [user for user in node.users if user in carrying]
        if readers or node in counted or node in others:
            carrying.add(node)
            passed_on = all(node in leading.get(user, ()) for user in readers)
            if passed_on and node not in others and is_backward(node):
                leading[node] = _passed_on(node)
    return leading


def _leaving(output: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """The values that leave as gradients of weights, and those that leave as something else."""
    values = output.args[0] if isinstance(output.args[0], (list, tuple)) else output.args
    known = output.meta.get(WEIGHT_GRADIENTS, range(len(values)))
    nodes = [(position, value) for position, value in enumerate(values) if isinstance(value, fx.Node)]
    return {v for position, v in nodes if position in known}, {v for position, v in nodes if position not in known}


def _is_floating(node: fx.Node) -> bool:
    """Whether a node is a floating-point tensor, several results, or unknown; not where it is a size."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return value is None or isinstance(value, (tuple, list))


def _passed_on(node: fx.Node) -> set[fx.Node]:
    """The operands whose values a node only moves, adds or scales."""
    name = packet_name(node.target)
    moves = is_view(node) or is_cast(node) or is_partial_view(node) or is_tuple_view(node) or is_getitem(node)
    if moves or name in _PASSES_ON:
        return set(node.all_input_nodes)
    if name in _ADDS_A_PRODUCT or (name in _SCALES and _is_factor(node.args[1])):
        return {arg for arg in node.args[:1] if isinstance(arg, fx.Node)}
    return set()


def _is_factor(value: Any) -> bool:
    """Whether a value is one number: a constant, a size, or a tensor without dimensions."""
    operand = tensor(value)
    return operand is None or operand.dim() == 0
