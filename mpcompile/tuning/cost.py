"""What a rule costs: the work, or the bytes, of the operations that it takes out of the low type."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from mpcompile.analysis.compared import Compared
from mpcompile.passes.graph import dtype_of, is_backward, tensor
from mpcompile.passes.op_classes import OpClass, classify
from mpcompile.tuning.rules import rule_for

OBJECTIVES = ("time", "memory")


def costs(each: Compared, objective: str) -> dict[str, float]:
    """The cost of every rule in one call: floating-point operations of its matmuls for ``time``, bytes that the 16-bit
    operands and results of forward would take more in fp32 for ``memory``."""
    found: dict[str, float] = {}
    for node in each.runs.gm.graph.nodes:
        if node.op == "call_function" and classify(node.target) is OpClass.LOW:
            found = added(found, {rule_for(node): _operations(node) if objective == "time" else _bytes(node)})
    return found


def added(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """The sums over the keys of both."""
    return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in {**first, **second}}


def _operations(node: fx.Node) -> float:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    shapes = tree_map(
        lambda value: value.meta["val"] if isinstance(value, fx.Node) else value, (node.args, node.kwargs)
    )
    return float(count(*shapes[0], **shapes[1], out_val=node.meta["val"])) if count else 0.0


def _bytes(node: fx.Node) -> float:
    if is_backward(node):
        return 0.0
    values = [tensor(value) for value in (node, *node.all_input_nodes) if dtype_of(value) is not torch.float32]
    return float(sum(value.numel() * 2 for value in values if value is not None))
