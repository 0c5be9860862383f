"""Compute low products in the fp32 kernel, for a device without instructions for the low type.

Its own low kernels are loops, tens of times slower than fp32. A product of two rounded values, summed in fp32, is what
a low matmul is; only the speed differs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from mpcompile.passes.edit import insert_after, insert_cast, refresh, replace_arguments
from mpcompile.passes.graph import aten, dtype_of, is_getitem, op_name, packet_name, tensor
from mpcompile.passes.low_copies import exact_source
from mpcompile.passes.op_classes import OpClass, classify, roles_of
from mpcompile.passes.policy import Policy
from mpcompile.passes.result import Change, PassResult

_MATRICES = {"mm": slice(0, 2), "addmm": slice(1, 3)}
"""Which arguments of a product are its matrices."""


def emulate_low_products(gm: fx.GraphModule, policy: Policy, *, elides_roundings: bool = False) -> PassResult:
    """Widen the operands of every low operation right before it and round its result right after.

    before:  mm = aten.mm(x_low, w_low)                                   # bf16
    after:   mm = aten.mm(convert(x_low, f32), convert(w_low, f32))       # f32
             mm_low = convert(mm, bf16)

    Legal because widening is exact and a low kernel accumulates in fp32 and rounds once. Runs on the forward and the
    backward graph after partitioning, so what is saved between them stays low. Leaves alone: operations with fp32
    operands, operators outside the table (a custom kernel decides for itself), and the product of one row with a matrix
    that is read along its rows. ``elides_roundings``: the code generator drops a narrowing that is followed by a
    widening in the same kernel; it is kept from seeing the pair.
    """
    changes = []
    wide: dict[fx.Node, fx.Node] = {}
    for node in list(gm.graph.nodes):
        roles = roles_of(node.target) if node.op == "call_function" else None
        if roles is None or classify(node.target) is not OpClass.LOW:
            continue
        if not any(dtype_of(source) is policy.dtype for source in node.all_input_nodes) or _is_of_one_row(node):
            continue
        _widen_operands(node, roles.operands, policy.dtype, wide)
        _round_results(node, roles.outputs, policy.dtype, elides_roundings)
        changes.append(Change(node.name, op_name(node), str(policy.dtype)[6:], "float32", "emulated"))
    return PassResult("emulate_low_products", tuple(changes))


def _is_of_one_row(node: fx.Node) -> bool:
    """Whether a product is bound by the reading of a matrix, which torch's own low kernel reads in half the bytes.

    That kernel needs no instructions for the low type: every element is widened as it is read and summed in fp32. It is
    fast where the elements that are summed lie side by side, and a hundred times too slow where they do not.
    """
    names = _MATRICES.get(packet_name(node.target))
    if names is None:
        return False
    row, matrix = (tensor(operand) for operand in node.args[names])
    if row is None or matrix is None or row.dtype is not matrix.dtype:
        return False
    return all(isinstance(size, int) and size == 1 for size in (row.shape[0], row.stride(1), matrix.stride(0)))


def _widen_operands(node: fx.Node, operands: tuple[str, ...], low: torch.dtype, wide: dict[fx.Node, fx.Node]) -> None:
    def widened(source: fx.Node) -> fx.Node:
        if dtype_of(source) is not low:
            return source
        if source not in wide:
            wide[source] = exact_source(source) or insert_cast(source, torch.float32)
        return wide[source]

    def widen(name: str, value: Any) -> Any:
        return map_arg(value, widened) if name in operands else value

    replace_arguments(node, widen)
    refresh(node)


def _round_results(node: fx.Node, outputs: tuple[int, ...], low: torch.dtype, hidden: bool) -> None:
    if tensor(node) is not None:
        results = [node]
    else:
        results = [user for user in node.users if is_getitem(user) and user.args[1] in outputs]
        for item in results:
            item.meta["val"] = node.meta["val"][item.args[1]]
    for result in results:
        narrowed = insert_cast(result, low)
        rounded = _through_integers(narrowed) if hidden else narrowed
        result.replace_all_uses_with(rounded)
        narrowed.args = (result, *narrowed.args[1:])


def _through_integers(low: fx.Node) -> fx.Node:
    """The same bits, read as integers and back: a code generator no longer knows what they were narrowed from."""
    bits = insert_after(low, aten.view.dtype, (low, torch.int16), {}, low)
    return insert_after(bits, aten.view.dtype, (bits, low.meta["val"].dtype), {}, low)
