"""Let gradients of 16-bit parameters leave the graph in fp32, where they are accumulated in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mpcompile.passes.edit import insert_after, insert_cast, insert_view
from mpcompile.passes.graph import LOW_DTYPES, aten, dtype_of, is_cast, is_view, op_name, output_of, viewed
from mpcompile.passes.policy import Policy
from mpcompile.passes.result import Change, PassResult

WIDE_GRADIENTS = "mixprec_wide_gradients"
"""Key of ``gm.meta``: positions of the outputs that are gradients of 16-bit parameters."""


def widen_gradients(gm: fx.GraphModule, policy: Policy) -> PassResult:
    """Return the gradients of 16-bit parameters in fp32, without rounding them on the way out.

    before:  grad = convert(sum, bf16);  return grad
    after:   return sum

    Legal because autograd casts what it is given to the parameter's ``grad_dtype``: fp32 where it has masters, else its
    own dtype, rounded then. (Whether it has may change without a new compilation.) Leaves alone every other output.
    """
    changes: list[Change] = []
    positions = gm.meta.get(WIDE_GRADIENTS, ())
    if not positions:
        return PassResult("widen_gradients", ())
    output = output_of(gm)
    values = list(output.args[0])  # type: ignore[arg-type]
    for position in positions:
        gradient = values[position]
        if dtype_of(gradient) in LOW_DTYPES:
            wide = _wide(gradient)
            if _is_shared(wide, values):
                wide = insert_after(wide, aten.clone.default, (wide,), {}, gradient)
            values[position] = wide
            before = str(dtype_of(gradient))[6:]
            changes.append(Change(wide.name, op_name(wide), before, "float32", "accumulated in its grad_dtype"))
    output.args = (values,)
    return PassResult("widen_gradients", tuple(changes))


def _is_shared(node: fx.Node, others: list[Any]) -> bool:
    """Whether a node has its memory in common with an input or another output."""
    root = viewed(node)
    return root.op == "placeholder" or any(isinstance(other, fx.Node) and viewed(other) is root for other in others)


def _wide(node: fx.Node) -> fx.Node:
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node):
        if is_cast(node) and dtype_of(source) is torch.float32:
            return source
        if is_view(node):
            return insert_view(node, _wide(source))
    return insert_cast(node, torch.float32)
