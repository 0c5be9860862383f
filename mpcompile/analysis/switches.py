"""Integers and booleans that came out otherwise in mixed precision than in fp64, and the values they were made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mpcompile.analysis.runs import Runs
from mpcompile.passes.graph import is_cast, is_getitem, packet_name

_CLIPPING = frozenset("relu clamp clamp_min clamp_max hardtanh maximum minimum".split())
"""What has no slope on one side of the place where a comparison of its result switches."""
_COPIES = frozenset(("alias", "detach", "clone"))


def came_out_otherwise(node: fx.Node, runs: Runs) -> bool:
    """Whether a node is an integer or boolean tensor that is another one in mixed precision than in fp64."""
    mixed, wide = runs.mixed[node.name], runs.wide[node.name]
    is_discrete = isinstance(mixed, Tensor) and not (mixed.is_floating_point() or mixed.is_complex())
    return is_discrete and not torch.equal(mixed, wide)


def compared_values(switches: Sequence[fx.Node], runs: Runs) -> Iterator[tuple[fx.Node, Tensor]]:
    """The floating-point values that ``switches`` were made from by comparing, with their errors where these crossed.

    Errors are fp64, of the value's shape, and never all zero.
    """
    seen = set(switches)
    frontier = list(switches)
    while frontier:
        switch = frontier.pop()
        for source in _operands(switch):
            value = runs.wide[source.name]
            if isinstance(value, Tensor) and value.is_floating_point():
                source = _before_clipping(source)
                crossed = _crossed(source, switch, runs)
                if crossed is not None and source not in seen:
                    seen.add(source)
                    yield source, crossed
            elif source not in seen and came_out_otherwise(source, runs):
                seen.add(source)
                frontier.append(source)


def _operands(node: fx.Node) -> list[fx.Node]:
    """What an operation reads, for one of several results too."""
    return node.all_input_nodes[0].all_input_nodes if is_getitem(node) else node.all_input_nodes


def _before_clipping(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and (is_cast(node) or packet_name(node.target) in _CLIPPING | _COPIES):
        node = node.all_input_nodes[0]
    return node


def _crossed(value: fx.Node, switch: fx.Node, runs: Runs) -> Tensor | None:
    """The error of a value where the comparison came out otherwise; everywhere, where that cannot be told."""
    error: Any = runs.mixed[value.name].double() - runs.wide[value.name]
    flipped = runs.mixed[switch.name] != runs.wide[switch.name]
    if flipped.shape == error.shape and bool((error * flipped).any()):
        error = error * flipped
    return error if bool(error.isfinite().all()) and bool(error.any()) else None
