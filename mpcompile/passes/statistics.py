"""Keep the running statistics of batch normalisation finite when a forward in fp16 overflows."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import fx

from mpcompile.passes.edit import insert_after
from mpcompile.passes.graph import aten, is_backward, op_name, packet_name, user_op_name
from mpcompile.passes.policy import Policy
from mpcompile.passes.result import Change, PassResult


def keep_statistics_finite(gm: fx.GraphModule, policy: Policy) -> PassResult:
    """Let a running mean or variance keep its old value where the new one is not finite.

    before:  copy_(running_mean, new_mean)
    after:   copy_(running_mean, where(abs(new_mean) < inf, new_mean, running_mean))

    An overflowed forward belongs to a step that is skipped, but the statistics would stay infinite for good. Legal
    because finite statistics are what they were. Leaves alone: bf16 (it has fp32's range) and every other buffer.
    """
    changes: list[Change] = []
    for node in gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
        buffer, new = node.args[:2]
        if policy.dtype is torch.float16 and _is_statistic(new) and not _is_guarded(new):
            size = insert_after(new, aten.abs.default, (new,), {}, new)
            finite = insert_after(size, aten.lt.Scalar, (size, float("inf")), {}, new)
            kept = insert_after(finite, aten.where.self, (finite, new, buffer), {}, new, f"finite_{new.name}")
            node.replace_input_with(new, kept)
            changes.append(Change(kept.name, op_name(kept), "float32", "float32", "statistics stay finite"))
    return PassResult("keep_statistics_finite", tuple(changes))


def _is_statistic(node: object) -> bool:
    # Instance normalisation averages the statistics of its instances, and copies them into the buffer.
    while _is_call(node) and packet_name(node.target) in ("alias", "view", "mean", "copy"):
        node = node.args[1 if packet_name(node.target) == "copy" else 0]
    return _is_call(node) and not is_backward(node) and "batch_norm" in user_op_name(node)


def _is_call(node: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and node.op == "call_function"


def _is_guarded(node: fx.Node) -> bool:
    return node.target is aten.where.self
