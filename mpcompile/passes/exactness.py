"""Which values the low type holds exactly, because nothing but selections lies between them and low values."""

from __future__ import annotations

import math

import torch
from torch import fx

from mpcompile.passes.graph import dtype_of, packet_name, source_of_widening
from mpcompile.passes.readers import origin

_SELECTIONS = frozenset(
    """relu neg abs amax amin maximum minimum where cat stack gather index index_select constant_pad_nd flip roll repeat
max_pool2d_with_indices _low_memory_max_pool_with_offsets""".split()
)
"""Operations that round nothing: every element of the result is one of the operands', its negative, or a constant."""


def sources(node: fx.Node, low: torch.dtype) -> list[fx.Node] | None:
    """What has to be in the low type for ``node`` to be exact in it; None where nothing makes it so.

    Operands that are in the low type as things are do not count: an empty list says that ``node`` is exact.
    """
    if packet_name(node.target) not in _SELECTIONS or not _holds_exact_numbers(node, low):
        return None
    operands = [origin(operand) for operand in node.all_input_nodes if dtype_of(operand) is torch.float32]
    return [operand for operand in operands if not _is_exact_already(operand, low)]


def _is_exact_already(node: fx.Node, low: torch.dtype) -> bool:
    source = source_of_widening(node)
    if source is not None:
        return dtype_of(source) is low
    return packet_name(node.target) in ("full", "zeros", "ones", "scalar_tensor") and _holds_exact_numbers(node, low)


def _holds_exact_numbers(node: fx.Node, low: torch.dtype) -> bool:
    numbers = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, float)]
    return all(math.isnan(number) or torch.tensor(number, dtype=low).item() == number for number in numbers)
