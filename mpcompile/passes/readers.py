"""Who reads a value, and what each reader can bear: the low form, or only what was not rounded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from mpcompile.passes.graph import (
    CAST,
    LOW_DTYPES,
    aten,
    dtype_of,
    is_backward,
    is_cast,
    is_getitem,
    is_partial_view,
    is_tuple_view,
    is_view,
    packet_name,
    tensor,
)
from mpcompile.passes.op_classes import RANKING_OPS, STATISTICS, OpClass, classify

_SIGNS = frozenset("sign sgn signbit".split())
_COMPARISONS = frozenset("eq ne lt le gt ge".split())


def is_moved(node: fx.Node) -> bool:
    """Whether a node holds elements of its argument as they are: a view, a slice, a piece of a split."""
    return is_view(node) or is_partial_view(node) or is_tuple_view(node) or is_getitem(node)


def origin(node: fx.Node) -> fx.Node:
    """What a node holds elements of; itself where it computes."""
    while is_moved(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def readers_below(reader: fx.Node) -> Iterator[fx.Node]:
    """The operations that read what a reader only moves; itself where it computes."""
    if not is_moved(reader):
        yield reader
    else:
        for user in reader.users:
            yield from readers_below(user)


def is_narrowing(node: fx.Node) -> bool:
    """Whether a node is a cast to the low type that a pass put in."""
    return CAST in node.meta and dtype_of(node) in LOW_DTYPES


def low_form(node: fx.Node) -> fx.Node | None:
    """The low copy of a value that is there anyway, because a product reads it."""
    return next((user for user in node.users if is_narrowing(user)), None)


def is_computed(reader: fx.Node) -> bool:
    """Whether a reader computes in fp32: it is no output of the graph, no cast, and no view that is either."""
    if reader.op != "call_function" or is_cast(reader):
        return False
    return not is_moved(reader) or all(map(is_computed, reader.users))


def reads_unrounded(reader: fx.Node, kept: set[fx.Node]) -> bool:
    """Whether a reader must see a value before rounding, itself or through views of it.

    Outputs, the user's own casts, sums and statistics, comparisons and rankings, products (what they read in fp32 is
    no operand: a mask, a statistic of attention), operators that are not known, and the operations in ``kept``: those
    that the compute plan keeps in fp32 (a router, an island).
    """
    if not is_computed(reader):
        return True
    if is_moved(reader):
        return any(reads_unrounded(user, kept) for user in reader.users)
    name = packet_name(reader.target)
    takes_as_traced = classify(reader.target) in (OpClass.LOW, OpClass.OPAQUE)
    return takes_as_traced or name in RANKING_OPS or name in STATISTICS or reader in kept


def reads_sign(reader: fx.Node) -> bool:
    """Whether all that a reader learns of a value, itself or through views, is how it compares with zero."""
    return all(map(_is_sign, readers_below(reader))) and is_computed(reader)


def keeps_signs(low: torch.dtype) -> bool:
    """Whether a value compares with zero as its low form does: where the low type has fp32's range of exponents.

    What is below its normal numbers, 2^-126, may be rounded to zero; many kernels take it for zero in fp32 as well.
    """
    return torch.finfo(low).smallest_normal == torch.finfo(torch.float32).smallest_normal


def _is_sign(node: fx.Node) -> bool:
    name = packet_name(node.target)
    return name in _SIGNS or (name in _COMPARISONS and node.args[1:] == (0,))


def accumulates(reader: fx.Node) -> bool:
    """Whether a reader, itself or through views, adds two computed values of one shape: a residual stream, a sum of
    gradients."""
    if is_moved(reader):
        return any(map(accumulates, reader.users))
    if reader.target is not aten.add.Tensor:
        return False
    first, second = (tensor(arg) for arg in reader.args[:2])
    return first is not None and second is not None and first.shape == second.shape


def feeds_convolution(low: fx.Node | None) -> bool:
    """Whether a low copy is an operand of a convolution."""
    return low is not None and any(
        "convolution" in packet_name(user.target) or (is_view(user) and feeds_convolution(user)) for user in low.users
    )


def is_later(reader: fx.Node) -> bool:
    """Whether a reader belongs to backward, or moves the value for backward alone."""
    return is_backward(reader) or (is_moved(reader) and bool(reader.users) and all(map(is_later, reader.users)))
