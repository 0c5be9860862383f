"""fp16's range: numbers that it cannot hold keep what they belong to in fp32.

A constant beyond 65504 becomes infinite in fp16, one below 2^-24 becomes zero; bf16 has the range of fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.passes.graph import (
    arguments,
    is_cast,
    is_partial_view,
    is_tuple_view,
    is_view,
    packet_name,
    parameter_name,
)

LARGEST = 65504.0
"""The largest finite fp16 number, (2 - 2^-10) 2^15."""
SMALLEST = 2.0**-24
"""The smallest positive fp16 number, subnormal."""
BEYOND_RANGE = "mixprec_beyond_range"
"""Key of ``node.meta`` of a placeholder: it is a parameter that holds values beyond ``LARGEST``."""

_FILLS = frozenset("full full_like new_full scalar_tensor masked_fill constant_pad_nd".split())


def beyond_range(values: Iterable[Any]) -> float | None:
    """The first finite number among ``values`` that fp16 cannot hold, or None."""
    for value in values:
        if isinstance(value, float) and (LARGEST < abs(value) < float("inf") or 0 < abs(value) < SMALLEST):
            return value
    return None


def guard_range(node: fx.Node, low: torch.dtype) -> str | None:
    """Why a low operation stays in fp32 for the range of ``low``: the sentence for the report, or None."""
    if low is not torch.float16:
        return None
    constant = beyond_range(tree_leaves((node.args, node.kwargs)))
    if constant is not None:
        return f"its constant {constant:g} is beyond float16"
    for operand in _origins(node):
        if BEYOND_RANGE in operand.meta:
            return f"parameter {parameter_name(operand)!r} holds values beyond float16's {LARGEST:g}"
        fill = _filled_with(operand)
        if fill is not None:
            return f"an operand is filled with {fill:g}, beyond float16"
    return None


def _origins(node: fx.Node) -> Iterator[fx.Node]:
    """The operands of an operation, below what only moves their elements."""
    for source in node.all_input_nodes:
        if source.op == "call_function" and _moves_elements(source):
            yield from _origins(source)
        else:
            yield source


def _moves_elements(node: fx.Node) -> bool:
    moves = is_view(node) or is_partial_view(node) or is_tuple_view(node) or is_cast(node)
    return moves or packet_name(node.target) in ("cat", "stack")


def _filled_with(node: fx.Node) -> float | None:
    """The number beyond range that an operand surely holds."""
    name = packet_name(node.target)
    if name in _FILLS:
        return beyond_range(float(v) for k, v in arguments(node) if _is_number(v) and k in ("fill_value", "s", "value"))
    if name == "where":
        return next((fill for source in _origins(node) if (fill := _filled_with(source)) is not None), None)
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
