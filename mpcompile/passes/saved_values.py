"""Predict what a partitioner will save of forward for backward.

The same question as the partitioner's, with the same answer as far as bytes go: of all sets of forward values from
which backward can be computed without repeating a product, a random number or a reduction, take the one with the
fewest bytes (Chen et al., "Training deep nets with sublinear memory cost", 2016, as a minimum cut).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mpcompile.passes.fusion import fuses, stages
from mpcompile.passes.graph import is_backward, is_getitem, is_tuple_view, is_view, packet_name, parameter_name, tensor
from mpcompile.passes.minimum_cut import NEVER, minimise
from mpcompile.passes.readers import origin

_NOMINAL = 64
"""What a dynamic dimension counts as: no decision may depend on its size."""

_KEPT = frozenset("embedding cat stack native_dropout bernoulli rand_like randn_like inductor_random".split())
"""Operations that fuse, and are never computed twice all the same."""


def elements(node: fx.Node) -> int:
    """Number of elements of a node's tensor (0 for none), a dynamic dimension counted as 64."""
    value = tensor(node)
    if value is None:
        return 0
    return math.prod(size if isinstance(size, int) else _NOMINAL for size in value.shape)


def size(node: fx.Node) -> int:
    """Bytes of a node's tensor, 0 for none."""
    value = tensor(node)
    return 0 if value is None else elements(node) * value.itemsize


@dataclass(frozen=True, slots=True)
class Partition:
    """How backward will come by the values of forward that it depends on."""

    saved: set[fx.Node]
    """Kept from forward to backward; inputs of the graph among them cost nothing."""
    recomputed: set[fx.Node]
    """Computed in backward, again or only there."""
    forward: set[fx.Node]
    """Read or computed in forward, for its results or to be saved."""


def predict_partition(graph: fx.Graph, stage: dict[fx.Node, int] | None = None) -> Partition:
    """Predict how a partitioner will cut a joint graph; ``stage``: that of ``fusion.stages``, where one has it."""
    stage = stages(graph) if stage is None else stage
    backward = _only_in_backward(graph)
    forward = _needed_forward(graph)
    distance = _distances(graph, backward)
    cost: dict[tuple[str, fx.Node], float] = {}
    pulls: list[tuple[tuple[str, fx.Node], tuple[str, fx.Node], float]] = []
    # ("computed", n): backward can compute n anew; ("there", n): backward has n, computed or saved.
    for node in distance:
        computed, there = ("computed", node), ("there", node)
        kept = node in forward and _is_kept(node, stage, forward)
        cost[computed] = NEVER if kept else -NEVER if _is_never_saved(node) else 0.0
        cost[there] = -NEVER if not backward.isdisjoint(node.users) else 0.0
        pulls.append((there, computed, _weight(node, distance[node])))
        if not kept:
            pulls += [(computed, ("there", source), NEVER) for source in node.all_input_nodes if source in distance]
    present = minimise(cost, pulls)
    recomputed = {node for node in distance if ("computed", node) in present}
    saved = {node for node in distance if ("there", node) in present} - recomputed
    return Partition(saved, recomputed, _with_sources(graph, saved | forward))


def _only_in_backward(graph: fx.Graph) -> set[fx.Node]:
    """What forward never computes: what autograd recorded for backward, but for masks that depend on no gradient.

    A mask, such as that of a relu, is a quarter of what it is computed from; nothing else that forward could compute
    ahead is smaller.
    """
    ahead: set[fx.Node] = set()
    for node in graph.nodes:
        value = tensor(node)
        is_mask = value is not None and value.dtype is torch.bool and is_backward(node)
        if is_mask and all(not is_backward(origin(source)) or source in ahead for source in node.all_input_nodes):
            ahead.add(node)
            ahead.update(view for source in node.all_input_nodes for view in _moves(source))
    return {node for node in graph.nodes if is_backward(node) and node not in ahead}


def _moves(node: fx.Node) -> Iterator[fx.Node]:
    """The views from a node down to what they are views of, without that."""
    while node is not origin(node):
        yield node
        (node,) = node.all_input_nodes[:1]


def _distances(graph: fx.Graph, backward: set[fx.Node]) -> dict[fx.Node, int]:
    """Values that backward depends on and forward can compute, and how many steps from backward."""
    distance: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        if node.op == "output" or node in backward:
            continue
        steps = [0 if user in backward else distance.get(user, math.inf) for user in node.users if user.op != "output"]
        nearest = min(steps, default=math.inf)
        if not math.isinf(nearest):
            distance[node] = int(nearest) + 1
    return dict(reversed(distance.items()))


def _with_sources(graph: fx.Graph, nodes: set[fx.Node]) -> set[fx.Node]:
    """Nodes and all that they are computed from."""
    found = set(nodes)
    for node in reversed(graph.nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return found


def _needed_forward(graph: fx.Graph) -> set[fx.Node]:
    """What forward computes whether there is a backward or not; the rest belongs to backward if it is not saved."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            needed |= {source for source in node.all_input_nodes if not is_backward(source)}
        elif node.op == "placeholder" or node in needed or (node.is_impure() and not is_backward(node)):
            needed |= {node, *node.all_input_nodes}
    return needed


def _weight(node: fx.Node, distance: int) -> float:
    """What saving a value costs: its bytes; more where it need not be written otherwise, or is far from backward."""
    if node.op != "call_function":
        return 0.0 if parameter_name(node) else float(size(node))
    if _is_free(node) or isinstance(node.meta.get("val"), (tuple, list)):
        return NEVER  # a view is saved as what it is a view of
    written = not all(fuses(user) for user in node.users) or not fuses(node)
    return size(node) * 1.1 ** min(distance, 100) * (1 if written else 2)


def _is_free(node: fx.Node) -> bool:
    return is_view(node) or is_tuple_view(node) or packet_name(node.target) in ("slice", "select", "as_strided")


def _is_kept(node: fx.Node, stage: dict[fx.Node, int], forward: set[fx.Node]) -> bool:
    """Whether backward never computes a value anew: it saves it, or something computed from it."""
    if node.op != "call_function":
        return True
    if _is_free(node) or (is_getitem(node) and fuses(node)):
        return False
    if node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
        return False
    if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
        return True
    if not fuses(node) or packet_name(node.target) in _KEPT or torch.Tag.nondeterministic_seeded in _tags(node):
        return True
    reads = sum(size(source) for source in node.all_input_nodes)
    if 4 * size(node) < reads or _is_used_far_apart(node, stage, forward):  # a reduction, a stream
        return True
    return any(not fuses(user) for user in _later_readers(node, forward))


def _is_never_saved(node: fx.Node) -> bool:
    return node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE


def _tags(node: fx.Node) -> list[torch.Tag]:
    return getattr(node.target, "tags", [])


def _is_used_far_apart(node: fx.Node, stage: dict[fx.Node, int], forward: set[fx.Node]) -> bool:
    """Whether a value continues one that an earlier kernel read: a residual stream, not to be followed to its start."""
    return any(
        source.op == "call_function"
        and fuses(source)
        and stage[node] > min(stage[user] for user in source.users if user in forward)
        for source in node.all_input_nodes
    )


def _later_readers(node: fx.Node, forward: set[fx.Node]) -> Iterator[fx.Node]:
    """What reads a value, or a view of it, and is not forward's."""
    for user in node.users:
        if is_view(user):
            yield from _later_readers(user, forward)
        elif user not in forward:
            yield user
