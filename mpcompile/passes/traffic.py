"""Predict how many bytes the kernels of a graph will read and write: what its time is where it is bound by memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from mpcompile.passes.fusion import fuses, stages
from mpcompile.passes.graph import is_backward, packet_name
from mpcompile.passes.readers import is_moved, origin
from mpcompile.passes.saved_values import predict_partition, size

_LOOKUPS = frozenset("embedding index _unsafe_index index_select gather".split())
"""Operations that read as many elements of their first argument as they return."""
_SCATTERS = frozenset(
    """index_put _unsafe_index_put _unsafe_masked_index_put_accumulate index_add scatter scatter_add
scatter_reduce""".split()
)
"""Operations that write as many elements as they are given into their first argument, in place."""


def bytes_moved(graph: fx.Graph) -> int:
    """Bytes that forward and backward of a joint graph (or an inference graph) read and write, as it is now.

    A value is written once if another kernel reads it, if it is kept for backward or leaves the graph, and read once by
    every kernel that reads it. What backward computes anew is computed in the kernel that reads it, from what is kept.
    Dynamic dimensions count as 64. An estimate that ranks variants of one graph: kernels may fuse more, or less.
    """
    stage = stages(graph)
    partition = predict_partition(graph, stage)
    later = {node for node in graph.nodes if is_backward(node) and node not in partition.forward}
    kernel = {node: (stage[node], node in later) if fuses(node) else node for node in graph.nodes}
    anew = {node: partition.recomputed for node in later}
    return sum(moved for _, moved in _moves(graph, kernel, anew))


def bytes_moved_by_fused(graph: fx.Graph) -> int:
    """Bytes that the fused kernels of a graph read and write which is compiled by itself: forward, or backward.

    What products and other operations that are kernels of their own read and write is left out.
    """
    stage = stages(graph)
    kernel = {node: stage[node] if fuses(node) else node for node in graph.nodes}
    return sum(moved for by, moved in _moves(graph, kernel, {}) if not isinstance(by, fx.Node))


def _moves(
    graph: fx.Graph, kernel: Mapping[fx.Node, Any], anew: Mapping[fx.Node, set[fx.Node]]
) -> Iterator[tuple[Any, int]]:
    """Every kernel that reads or writes memory, and how many bytes.

    ``anew``: by reader, the values that are not in memory for it, being computed in its kernel.
    """
    read: dict[tuple[fx.Node, Any], int] = {}
    written: set[fx.Node] = set()
    for node, source in _operands(graph, anew):
        value = origin(source)
        if kernel[value] == kernel[node]:
            continue
        if value.op == "call_function":
            written.add(value)
        if node.op != "output":
            place = (value, kernel[node])
            read[place] = max(read.get(place, 0), _read_by(node, source, value))
    for (_, by), moved in read.items():
        yield by, moved
    for value in written:
        if packet_name(value.target) not in _SCATTERS:
            yield kernel[value], size(value)


def _operands(graph: fx.Graph, anew: Mapping[fx.Node, set[fx.Node]]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Every node but views, whose readers count, and each value that it reads."""
    for node in graph.nodes:
        if not is_moved(node):
            for operand in node.all_input_nodes:
                for source in _in_memory(operand, anew.get(node, set())):
                    yield node, source


def _read_by(reader: fx.Node, source: fx.Node, value: fx.Node) -> int:
    """Bytes that ``reader`` reads of ``value``, through its view ``source``; what it adds to, it writes again."""
    whole = min(size(source), size(value))
    if not reader.args or source is not reader.args[0]:
        return whole
    name = packet_name(reader.target)
    if name in _SCATTERS:
        return 2 * min(whole, max(map(size, reader.all_input_nodes[1:]), default=0))
    return min(whole, size(reader)) if name in _LOOKUPS else whole


def _in_memory(operand: fx.Node, anew: set[fx.Node]) -> Iterator[fx.Node]:
    """What is read from memory for an operand: itself, or what it is computed anew from."""
    if operand not in anew and origin(operand) not in anew:
        yield operand
        return
    for source in operand.all_input_nodes:
        yield from _in_memory(source, anew)
