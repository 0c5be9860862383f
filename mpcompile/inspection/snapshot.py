"""Copies of graphs, taken while a model compiles."""

from __future__ import annotations

from torch import fx

# Relied on: a module made inside ``_use_lazy_graph_module(True)`` generates its Python code when it first runs or is
# printed. Generating it at once would double what a copy costs, and most are never run.
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from mpcompile.passes.graph import subgraphs


def snapshot(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, and of the bodies of its higher-order ops, with their metadata."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        copy = copies[node] = graph.node_copy(node, lambda n: copies[n])
        if copy.name != node.name:
            copy.name = node.name
    with _use_lazy_graph_module(True):
        result: fx.GraphModule = _make_graph_module(gm, graph)
    result.meta = dict(gm.meta)
    for name, body in subgraphs(gm):
        setattr(result, name, snapshot(body))
    return result
