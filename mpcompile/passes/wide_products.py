"""Let a product of low operands leave its kernel in fp32, as it was accumulated, without rounding the result.

Free where a kernel offers it, and a large part of the error: a weight gradient is rounded only where it is an operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from mpcompile.passes.edit import refresh, replace_arguments
from mpcompile.passes.gradient_role import WGRAD
from mpcompile.passes.graph import LOW_DTYPES, aten, dtype_of, is_getitem, packet_name, tensor
from mpcompile.passes.op_classes import roles_of
from mpcompile.passes.policy import Policy

EMULATED = "mixprec_emulated"
"""Key of ``gm.meta`` of a graph for a device without instructions for the low type: its products are of widened low
operands in fp32 kernels, and any of them can leave in fp32."""

WIDE = "mixprec_wide"
"""Key of ``node.meta`` of a product of low operands, widened in front of it, that leaves in fp32."""

_PRODUCTS = frozenset("mm bmm addmm baddbmm convolution convolution_backward".split())


def rounds_no_product(policy: Policy) -> bool:
    """Whether every product that can is to leave in fp32, not only weight gradients."""
    return policy.preset == "accurate"


def leaves_wide(node: fx.Node, role: str, policy: Policy, *, emulated: bool) -> bool:
    """Whether the result of a product that reads low operands is to leave in fp32, and can on its device.

    Weight gradients under every preset, and under ``accurate`` every product. ``role``: that of ``gradient_roles``.
    """
    wanted = role == WGRAD or rounds_no_product(policy)
    if emulated:
        return wanted and packet_name(node.target) in _PRODUCTS
    return wanted and node.target is aten.mm.default and _on_cuda(node)


def leave_wide(node: fx.Node, widened: Callable[[fx.Node], fx.Node], *, emulated: bool) -> str:
    """Rewrite a product of low operands to return fp32; returns the sentence for the report.

    before:  mm = aten.mm(x_low, g_low)                                     # bf16
    after:   mm = aten.mm.dtype(x_low, g_low, float32)                      # f32, on CUDA
             mm = aten.mm(convert(x_low, f32), convert(g_low, f32))         # f32, where products are emulated

    Legal because widening is exact and a low kernel accumulates in fp32. ``widened`` gives the fp32 form of a low node.
    """
    if not emulated:
        node.target = aten.mm.dtype
        node.args = (*node.args, torch.float32)
        refresh(node)
        return "low operands, fp32 result straight from the GEMM"
    roles = roles_of(node.target)
    node.meta[WIDE] = True

    def widen(name: str, value: Any) -> Any:
        if roles is not None and name not in roles.operands:
            return value
        return map_arg(value, lambda a: widened(a) if dtype_of(a) in LOW_DTYPES else a)

    replace_arguments(node, widen)
    refresh(node)
    for item in [user for user in node.users if is_getitem(user)]:
        item.meta["val"] = node.meta["val"][item.args[1]]
    return "low operands, fp32 result"


def _on_cuda(node: fx.Node) -> bool:
    value = tensor(node)
    return value is not None and value.device.type == "cuda" and torch.version.hip is None
