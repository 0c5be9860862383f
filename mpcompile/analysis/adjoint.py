"""Reverse-mode differentiation over the nodes of a graph, backward nodes included: d(target) / d(value of every node).

Node by node rather than one autograd graph over the whole: an operation without a derivative is named instead of
failing the rest, only one operation's intermediates are alive at a time, and gradients can be kept apart by reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpcompile.analysis.evaluate import Values, evaluate, floating, is_random
from mpcompile.passes.graph import is_cast, is_getitem, is_partial_view, is_tuple_view, is_view

Cotangent = list[Tensor | None]
"""d(target) / d(result), for every result of a node; None where there is none."""
Cotangents = dict[str, Cotangent]
"""Cotangents by the reader through which they came; ``""``: all readers together."""


def passes_through(node: fx.Node) -> bool:
    """Whether a node only changes the form of one value: a view, a piece, a cast."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1:
        return False
    return any(test(node) for test in (is_view, is_partial_view, is_cast, is_getitem, is_tuple_view))


def pull_back(
    gm: fx.GraphModule,
    values: Mapping[str, Any],
    seeds: dict[fx.Node, Tensor],
    damping: Mapping[str, float],
    barriers: dict[str, str],
) -> Iterator[tuple[fx.Node, Cotangents]]:
    """Every node that ``seeds`` depend on, last first, with its cotangents; of views and casts apart by final reader.

    ``values``: of all nodes, in fp64; ``seeds``: cotangents of the first result of nodes, and whoever iterates may add
    some of earlier nodes; ``damping``: factor on what goes on to the inputs of a node, by name, where it is not 1.
    ``barriers`` takes the names of operations that could not be differentiated, with the reason.
    """
    waiting: dict[fx.Node, Cotangents] = {}
    for node in reversed(gm.graph.nodes):
        if node in seeds:
            _add(waiting, node, "", [seeds[node]])
        cotangents = waiting.pop(node, None)
        if cotangents is None:
            continue
        yield node, cotangents
        if node.op != "call_function" or is_random(node):
            continue
        if not passes_through(node):
            cotangents = {node.name: _scaled(total(cotangents), damping.get(node.name, 1.0))}
        for reader, cotangent in cotangents.items():
            for source, pulled in _through(node, values, cotangent, barriers):
                _add(waiting, source, reader if passes_through(source) else "", pulled)


def _through(
    node: fx.Node, values: Mapping[str, Any], cotangent: Cotangent, barriers: dict[str, str]
) -> Iterator[tuple[fx.Node, Cotangent]]:
    """The cotangents of the arguments of one operation."""
    sources = [source for source in node.all_input_nodes if any(v is not None for v in floating(values[source.name]))]
    own: Values = {source.name: values[source.name] for source in node.all_input_nodes}
    leaves: list[tuple[fx.Node, int, int, Tensor]] = []
    for source in sources:
        flat, spec = tree_flatten(values[source.name])
        for index, value in enumerate(flat):
            if isinstance(value, Tensor) and value.is_floating_point():
                flat[index] = value.detach().requires_grad_()
                leaves.append((source, index, len(flat), flat[index]))
        own[source.name] = tree_unflatten(flat, spec)
    try:
        gradients = _differentiate(node, own, cotangent, [leaf for *_, leaf in leaves])
    except (RuntimeError, NotImplementedError) as error:
        barriers[node.name] = str(error).splitlines()[0]
        return
    pulled: dict[fx.Node, Cotangent] = {}
    for (source, index, count, _), gradient in zip(leaves, gradients, strict=True):
        pulled.setdefault(source, [None] * count)[index] = gradient
    for source, found in pulled.items():
        if any(gradient is not None for gradient in found):
            yield source, found


def _differentiate(node: fx.Node, values: Values, cotangent: Cotangent, leaves: list[Tensor]) -> Any:
    with torch.enable_grad():
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: values[source.name])
        results = floating(evaluate(node, args, kwargs, torch.float64))
    pairs = [
        (result, given)
        for result, given in zip(results, cotangent, strict=False)
        if result is not None and given is not None
    ]
    if not pairs or not leaves:
        return [None] * len(leaves)
    if not any(result.requires_grad for result, _ in pairs):
        raise NotImplementedError("the operator has no derivative")
    pairs = [(result, given) for result, given in pairs if result.requires_grad]
    outputs, given = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, leaves, given, allow_unused=True)


def _add(waiting: dict[fx.Node, Cotangents], node: fx.Node, reader: str, cotangent: Cotangent) -> None:
    kept = waiting.setdefault(node, {})
    kept[reader] = _sum([kept[reader], cotangent]) if reader in kept else cotangent


def total(cotangents: Cotangents) -> Cotangent:
    """The cotangents of a node, over all readers."""
    return _sum(cotangents.values())


def _scaled(cotangent: Cotangent, factor: float) -> Cotangent:
    return cotangent if factor == 1 else [None if value is None else value * factor for value in cotangent]


def _sum(cotangents: Iterable[Cotangent]) -> Cotangent:
    found: Cotangent = []
    for cotangent in cotangents:
        found += [None] * (len(cotangent) - len(found))
        for index, value in enumerate(cotangent):
            if value is not None:
                before = found[index]
                found[index] = value if before is None else before + value
    return found
