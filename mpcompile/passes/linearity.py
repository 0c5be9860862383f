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

from mpcompile.passes.graph import arguments, is_getitem, packet_name, tensor

_OF_FIRST = frozenset(
    """view reshape _unsafe_view permute transpose t unsqueeze squeeze expand alias detach slice select clone contiguous
split split_with_sizes chunk unbind as_strided diagonal unfold flip roll repeat tile constant_pad_nd reflection_pad1d
reflection_pad2d replication_pad1d replication_pad2d convert_element_type _to_copy device_put lift_fresh_copy tril triu
index _unsafe_index index_select gather embedding take masked_select sum mean cumsum neg trace avg_pool1d avg_pool2d
avg_pool3d _adaptive_avg_pool2d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d pixel_shuffle pixel_unshuffle channel_shuffle im2col col2im
_fft_r2c _fft_c2r _fft_c2c view_as_real view_as_complex real imag _conj _conj_physical resolve_conj resolve_neg
broadcast_in_dim triangular_solve cholesky_solve""".split()
)
"""Linear in their first argument."""

_SUMS = frozenset(
    """add sub cat stack where slice_scatter select_scatter as_strided_scatter diagonal_scatter index_put
_unsafe_index_put scatter scatter_add index_add index_copy masked_scatter copy""".split()
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

_BODIES = frozenset(
    """cond while_loop scan map_impl associative_scan invoke_subgraph flex_attention_backward
tag_activation_checkpoint wrap_with_set_grad_enabled""".split()
)
"""Higher-order operators: what autograd made of their bodies is linear."""


def carries_factor(node: fx.Node, scaled: Collection[fx.Node]) -> bool:
    """Whether multiplying every node of ``scaled`` by S multiplies the result of ``node`` by S.

    ``node`` reads at least one of ``scaled``. False where it is not so, and where it is not known.
    """
    name = packet_name(node.target)
    if is_getitem(node) or name in _BODIES:
        return True
    having = {argument for argument, value in _tensors(node) if value in scaled}
    if _is_aten(node) and all(argument.startswith("grad") for argument in having):
        return True
    if name in _OF_FIRST:
        first = next(argument for argument, _ in arguments(node))
        return having == {first} and not _fills(node)
    if name in _SUMS:
        return all(value in scaled or is_zero(value) for _, value in _summands(node)) and not _fills(node)
    if name in _PRODUCTS:
        return sum(value in scaled for _, value in _tensors(node)) == 1
    if name in _FUSED:
        (_, addend), *factors = _tensors(node)
        return sum(value in scaled for _, value in factors) == 1 and (addend in scaled or is_zero(addend))
    return having == {_LINEAR_IN.get(name)} or (name == "masked_fill" and having == {"self"} and not _fills(node))


def unscaled_summands(node: fx.Node, scaled: Collection[fx.Node]) -> list[fx.Node]:
    """The operands of a sum that lack the factor the others have; empty where ``node`` is no such sum."""
    if packet_name(node.target) not in _SUMS or _fills(node):
        return []
    return [value for _, value in _summands(node) if value not in scaled and not is_zero(value)]


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


def _summands(node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    yield from ((name, value) for name, value in _tensors(node) if name not in ("condition", "mask"))


def _is_floating(leaf: Any) -> bool:
    value = tensor(leaf)
    if value is None and isinstance(leaf, fx.Node):  # several results
        return any(isinstance(item, torch.Tensor) for item in tree_leaves(leaf.meta.get("val")))
    return value is not None and (value.is_floating_point() or value.is_complex())


def _is_aten(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"


def _fills(node: fx.Node) -> bool:
    """Whether an operation puts a number other than zero beside its operands (``add(g, 1)``, a pad value)."""
    numbers = {"other", "self", "value", "input"}
    return any(isinstance(value, (int, float)) and value != 0 for name, value in arguments(node) if name in numbers)
