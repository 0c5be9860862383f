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


def predict_partition(graph: fx.Graph, stage: dict[fx.Node, int] | None = None) -> Partition:
    """Predict how a partitioner will cut a joint graph; ``stage``: that of ``fusion.stages``, where one has it."""
    stage = stages(graph) if stage is None else stage
    distance = _distances(graph)
    forward = _needed_forward(graph)
    cost: dict[tuple[str, fx.Node], float] = {}
    pulls: list[tuple[tuple[str, fx.Node], tuple[str, fx.Node], float]] = []
    # ("computed", n): backward can compute n anew; ("there", n): backward has n, computed or saved.
    for node in distance:
        computed, there = ("computed", node), ("there", node)
        kept = node in forward and _is_kept(node, stage, forward)
        cost[computed] = NEVER if kept else 0.0
        cost[there] = -NEVER if any(map(is_backward, node.users)) else 0.0
        pulls.append((there, computed, _weight(node, distance[node])))
        if not kept:
            pulls += [(computed, ("there", source), NEVER) for source in node.all_input_nodes if source in distance]
    present = minimise(cost, pulls)
    recomputed = {node for node in distance if ("computed", node) in present}
    return Partition({node for node in distance if ("there", node) in present} - recomputed, recomputed)


def _distances(graph: fx.Graph) -> dict[fx.Node, int]:
    """Forward values that backward depends on, and how many steps from it."""
    distance: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        if node.op == "output" or is_backward(node):
            continue
        steps = [0 if is_backward(user) else distance.get(user, math.inf) for user in node.users if user.op != "output"]
        nearest = min(steps, default=math.inf)
        if not math.isinf(nearest):
            distance[node] = int(nearest) + 1
    return dict(reversed(distance.items()))


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
    if 4 * size(node) < reads or _is_used_far_apart(node, stage):  # a reduction, a stream
        return True
    return any(not fuses(user) for user in _later_readers(node, forward))


def _tags(node: fx.Node) -> list[torch.Tag]:
    return getattr(node.target, "tags", [])


def _is_used_far_apart(node: fx.Node, stage: dict[fx.Node, int]) -> bool:
    """Whether a value continues one that an earlier kernel read: a residual stream, not to be followed to its start."""
    return any(
        source.op == "call_function" and fuses(source) and stage[node] > min(map(stage.__getitem__, source.users))
        for source in node.all_input_nodes
    )


def _later_readers(node: fx.Node, forward: set[fx.Node]) -> Iterator[fx.Node]:
    """What reads a value, or a view of it, and is not forward's."""
    for user in node.users:
        if is_view(user):
            yield from _later_readers(user, forward)
        elif user not in forward:
            yield user
