"""Which operations of backward carry a factor of their incoming gradient through to their result.

Backward is linear in the incoming gradient wherever it is derived by autograd, so a loss scale passes through it. A
custom backward need not be: it may clip the gradient, compare it, square it, or add a constant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.passes.graph import arguments, is_getitem, output_of, packet_name, tensor

_OF_FIRST = frozenset(
    """view reshape _unsafe_view permute transpose t unsqueeze squeeze expand alias detach slice select clone contiguous
split split_with_sizes chunk unbind as_strided diagonal unfold flip roll repeat tile constant_pad_nd reflection_pad1d
reflection_pad2d replication_pad1d replication_pad2d convert_element_type _to_copy device_put lift_fresh_copy tril triu
index _unsafe_index index_select gather embedding take masked_select sum mean cumsum neg trace avg_pool1d avg_pool2d
avg_pool3d _adaptive_avg_pool2d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d pixel_shuffle pixel_unshuffle channel_shuffle im2col col2im
_fft_r2c _fft_c2r _fft_c2c view_as_real view_as_complex real imag _conj _conj_physical resolve_conj resolve_neg
broadcast_in_dim rev _unsafe_masked_index triangular_solve cholesky_solve""".split()
)
"""Linear in their first argument."""

_SUMS = frozenset(
    """add sub cat stack where slice_scatter select_scatter as_strided_scatter diagonal_scatter index_put
_unsafe_index_put _unsafe_masked_index_put_accumulate scatter scatter_add index_add index_copy masked_scatter
copy""".split()
)
"""Carry a factor that all their floating-point operands have."""

_PRODUCTS = frozenset(
    """mul mm bmm dot vdot mv outer ger matmul linear einsum tensordot convolution _convolution _grouped_mm
bilinear _trilinear cross kron linalg_cross""".split()
)
"""Carry a factor that exactly one of their operands has."""

_FUSED = frozenset("addmm baddbmm addbmm addmv addr addcmul".split())
"""A product added to the first argument."""

_LINEAR_IN = {
    "div": "self",
    "true_divide": "self",
    "linalg_solve_triangular": "B",
    "_linalg_solve_ex": "B",
    "linalg_solve": "B",
    "linalg_lu_solve": "B",
    "linalg_vecdot": "x",
}
"""Linear in the named argument, where the others do not have the factor."""


def carries_factor(node: fx.Node, scaled: Collection[fx.Node]) -> bool:
    """Whether multiplying every node of ``scaled`` by S multiplies the result of ``node`` by S.

    ``node`` reads at least one of ``scaled``. False where it is not so, and where it is not known.
    """
    name = packet_name(node.target)
    if is_getitem(node) or name == "flex_attention_backward":
        return True
    bodies = [child for child in map(_body, node.all_input_nodes) if child is not None]
    if bodies:
        return all(_body_carries_factor(node, body, scaled) for body in bodies)
    having = {argument for argument, value in _tensors(node) if value in scaled}
    if not having or not _gives_floats(node):
        return False
    if _is_aten(node) and all(argument.startswith("grad") for argument in having):
        return True
    if name in _OF_FIRST:
        first = next(argument for argument, _ in arguments(node))
        return having == {first} and not _fills(node)
    if name in _SUMS or name == "masked_fill":
        return all(value in scaled or is_zero(value) for _, value in _tensors(node)) and not _fills(node)
    if name in _PRODUCTS:
        biases = [value for argument, value in _tensors(node) if argument == "bias"]
        return not biases and sum(value in scaled for _, value in _tensors(node)) == 1
    if name in _FUSED or name == "fma":
        (_, addend), *factors = list(_tensors(node))[:: -1 if name == "fma" else 1]
        return sum(value in scaled for _, value in factors) == 1 and (addend in scaled or is_zero(addend))
    return having == {_LINEAR_IN.get(name)} and not dict(arguments(node)).get("rounding_mode")


def _body(node: fx.Node) -> fx.GraphModule | None:
    """The graph that an argument of a higher-order operator stands for."""
    owner = node.graph.owning_module
    child = getattr(owner, str(node.target), None) if node.op == "get_attr" else None
    return child if isinstance(child, fx.GraphModule) else None


def _body_carries_factor(call: fx.Node, body: fx.GraphModule, scaled: Collection[fx.Node]) -> bool:
    """The same for the body of a higher-order operator, whose inputs are the last operands of the call."""
    inputs = body.graph.find_nodes(op="placeholder")
    operands = [leaf for leaf in tree_leaves(call.args) if isinstance(leaf, fx.Node)][-len(inputs) :]
    within = {inner for inner, operand in zip(inputs, operands, strict=False) if operand in scaled}
    for node in body.graph.nodes:
        if node.op == "call_function" and any(source in within for source in node.all_input_nodes):
            if not carries_factor(node, within):
                return False
            within.add(node)
    results = [leaf for leaf in tree_leaves(output_of(body).args) if _is_floating(leaf)]
    return all(result in within or is_zero(result) for result in results)


def unscaled_summands(node: fx.Node, scaled: Collection[fx.Node]) -> list[fx.Node]:
    """The operands of a sum that lack the factor the others have; empty where ``node`` is no such sum."""
    if packet_name(node.target) not in _SUMS or _fills(node):
        return []
    return [value for _, value in _tensors(node) if value not in scaled and not is_zero(value)]


def is_zero(node: fx.Node) -> bool:
    """Whether a node is a tensor of zeros by construction: it has any factor."""
    name = packet_name(node.target)
    if name in ("zeros", "zeros_like", "new_zeros"):
        return True
    if name in ("full", "full_like", "new_full", "scalar_tensor"):
        fill = dict(arguments(node)).get("s" if name == "scalar_tensor" else "fill_value")
        return isinstance(fill, (int, float)) and fill == 0
    if name in ("expand", "view", "reshape", "unsqueeze", "clone", "convert_element_type", "_to_copy"):
        source = node.args[0]
        return isinstance(source, fx.Node) and is_zero(source)
    return False


def _tensors(node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """Name and node of every floating-point tensor an operation reads."""
    for name, value in arguments(node):
        for leaf in tree_leaves(value):
            if _is_floating(leaf):
                yield name, leaf


def _is_floating(leaf: Any) -> bool:
    value = tensor(leaf)
    if value is None and isinstance(leaf, fx.Node):  # several results
        return any(isinstance(item, torch.Tensor) for item in tree_leaves(leaf.meta.get("val")))
    return value is not None and (value.is_floating_point() or value.is_complex())


def _is_aten(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"


def _gives_floats(node: fx.Node) -> bool:
    """Whether the results are floating-point numbers: a cast to integers rounds, a comparison decides."""
    results = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
    return bool(results) and (results[0].is_floating_point() or results[0].is_complex())


def _fills(node: fx.Node) -> bool:
    """Whether an operation puts a number other than zero beside its operands (``add(g, 1)``, a pad value)."""
    numbers = {"other", "self", "value", "input", "fill"}
    return any(_is_a_number(value) for name, value in arguments(node) if name in numbers)


def _is_a_number(value: Any) -> bool:
    if isinstance(value, fx.Node):  # a dynamic size
        return isinstance(value.meta.get("val"), (torch.SymInt, torch.SymFloat))
    return isinstance(value, (int, float)) and value != 0
