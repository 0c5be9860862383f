"""Which parameters matmuls, convolutions and the like read: told before autograd, from the torch-level graph."""

from __future__ import annotations

import torch
from torch import fx

from mpcompile.passes.graph import subgraphs
from mpcompile.passes.intent import MATMULS, VIEWS, call_name, is_marked_fp32, matrix_operands

_INLINED = "tag_activation_checkpoint"
"""The higher-order op whose body autograd makes part of the graph."""


def matmul_weights(gm: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a torch-level graph that are matrix operands of LOW calls, themselves or as views; in order.

    Leaves out: biases, what only calls marked fp32 by ``read_intent`` read, and calls in the bodies of higher-order ops
    except checkpointing, which see no more inputs than they were captured with.
    """
    read = set(_sources(gm))
    return [node for node in gm.graph.find_nodes(op="placeholder") if node in read]


def single_row_weights(gm: fx.GraphModule) -> set[fx.Node]:
    """Those that nothing but products of one row with them, ``F.linear``, reads: inference on one example."""
    readers: dict[fx.Node, list[bool]] = {}
    for node in gm.graph.nodes:
        for operand in node.all_input_nodes:
            readers.setdefault(operand, []).append(_is_of_one_row(node) and operand is node.args[1])
    return {node for node in gm.graph.find_nodes(op="placeholder") if node in readers and all(readers[node])}


def _is_of_one_row(node: fx.Node) -> bool:
    if call_name(node) != "linear" or not isinstance(node.args[0], fx.Node):
        return False
    value = node.args[0].meta.get("example_value")
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) and size == 1 for size in value.shape[:-1])


def _sources(gm: fx.GraphModule) -> list[fx.Node]:
    bodies = dict(subgraphs(gm))
    found = []
    for node in gm.graph.nodes:
        if call_name(node) == _INLINED:
            found += _read_by_body(node, bodies)
        elif node.op.startswith("call") and call_name(node) in MATMULS and not is_marked_fp32(node):
            found += [_below_views(operand) for operand in matrix_operands(node)]
    return found


def _read_by_body(node: fx.Node, bodies: dict[str, fx.GraphModule]) -> list[fx.Node]:
    body, *operands = node.args
    assert isinstance(body, fx.Node)
    graph = bodies[str(body.target)]
    inner = graph.graph.find_nodes(op="placeholder")
    read = matmul_weights(graph)
    pairs = zip(inner, operands, strict=False)
    return [_below_views(given) for known, given in pairs if known in read and isinstance(given, fx.Node)]


def _below_views(node: fx.Node) -> fx.Node:
    while node.op.startswith("call") and call_name(node) in VIEWS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
