"""Dtypes, shapes and bytes of nodes, as records hold them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.passes.graph import LOW_DTYPES


def tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors that a node stands for."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield value
    elif value is not None:
        yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def dtype_name(value: torch.Tensor) -> str:
    """``bfloat16``."""
    return str(value.dtype).removeprefix("torch.")


def first_dtype(node: fx.Node) -> str:
    """Dtype of the (first) result, or ``""``."""
    return next(map(dtype_name, tensors(node)), "")


def first_shape(node: fx.Node) -> tuple[int | str, ...]:
    """Sizes of the (first) result; dynamic ones as text."""
    first = next(tensors(node), None)
    sizes: tuple[int | torch.SymInt, ...] = () if first is None else tuple(first.shape)
    return tuple(str(size) if isinstance(size, torch.SymInt) else size for size in sizes)


def total_bytes(node: fx.Node) -> int | None:
    """Bytes of all results; None where a size is dynamic."""
    total = 0
    for value in tensors(node):
        count: int | torch.SymInt = value.numel()
        if isinstance(count, torch.SymInt):
            return None
        total += count * value.itemsize
    return total


def bytes_in_fp32(node: fx.Node) -> int | None:
    """The same, had a 16-bit result been fp32."""
    count, first = total_bytes(node), next(tensors(node), None)
    return count if count is None or first is None or first.dtype not in LOW_DTYPES else 2 * count
