"""Read the low copies of parameters that the graph is given as inputs, in place of casting the parameters.

A copy may come in fp32, holding rounded values, for devices that multiply in fp32: then its low form is a cast that
rounds nothing, and ``emulation`` reads the copy itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from mpcompile.passes.edit import insert_cast, insert_view, recompute_in_backward
from mpcompile.passes.graph import EXACT, LOW_COPY, dtype_of, is_view, parameter_name
from mpcompile.passes.result import Change


def low_copy(node: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """The copy, in ``dtype``, of the parameter that ``node`` is; None where the graph has none."""
    name, low = node.meta.get(LOW_COPY, ("", None))
    if low is not dtype:
        return None
    copy = _input(node.graph, name)
    return copy if dtype_of(copy) is dtype else _narrowed(copy, dtype)


def _input(graph: fx.Graph, name: str) -> fx.Node:
    (found,) = (node for node in graph.find_nodes(op="placeholder") if node.name == name)
    assert isinstance(found, fx.Node)
    return found


def _narrowed(copy: fx.Node, dtype: torch.dtype) -> fx.Node:
    for user in copy.users:
        if EXACT in user.meta:
            return user
    low = insert_cast(copy, dtype)
    low.meta[EXACT] = True
    return low


def note_low_copies(gm: fx.GraphModule) -> Iterator[Change]:
    """Report the copies that are read, and keep what is made of them out of what is saved for backward.

    The copy itself is an input: to save it costs nothing, and torch then sees when it changes before backward.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        if LOW_COPY not in node.meta:
            continue
        name, low = node.meta[LOW_COPY]
        copy = _input(gm.graph, name)
        if copy.users:
            _recompute_views(copy)
            reason = f"low form of {parameter_name(node)}, from the weight cache"
            yield Change(copy.name, "placeholder", "float32", str(low)[6:], reason)


def _recompute_views(node: fx.Node) -> None:
    for user in node.users:
        if is_view(user) or EXACT in user.meta:
            recompute_in_backward(user)
            _recompute_views(user)


def exact_source(node: fx.Node) -> fx.Node | None:
    """The fp32 node of exactly the values of a low one, where it is a cast, or a view of one, that rounds nothing."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if EXACT in node.meta:
        return source
    if not is_view(node):
        return None
    base = exact_source(source)
    return None if base is None else insert_view(node, base)
