"""Which values the low type holds exactly, since only selections lie between them and low values; which it cannot."""

from __future__ import annotations

import math

import torch
from torch import fx

from mpcompile.passes.graph import dtype_of, is_backward, packet_name, parameter_name, source_of_widening
from mpcompile.passes.op_classes import OpClass, classify
from mpcompile.passes.readers import origin
from mpcompile.passes.saved_values import elements

_SELECTIONS = frozenset(
    """relu neg abs amax amin maximum minimum where cat stack gather index index_select constant_pad_nd flip roll repeat
max_pool2d_with_indices _low_memory_max_pool_with_offsets""".split()
)
"""Operations that round nothing: every element of the result is one of the operands', its negative, or a constant."""

_SUMS = frozenset(("add", "sub"))
_FILLS = frozenset("full full_like scalar_tensor masked_fill".split())


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


def beyond_range(graph: fx.Graph, low: torch.dtype) -> set[fx.Node]:
    """Values that may hold a finite number which is infinite in the low type: a mask of -3.4e38, what it is added to.

    Known by a constant, or by an input that is added to more elements than it has, as masks are; followed through
    selections, sums and scaling.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        begins = any(torch.finfo(low).max < abs(number) < math.inf for number in _numbers(node)) or _adds_a_mask(node)
        if begins or (_carries(node) and any(source in found for source in node.all_input_nodes)):
            found.add(node)
    return found


def _adds_a_mask(node: fx.Node) -> bool:
    if packet_name(node.target) not in _SUMS:
        return False
    inputs = [source for source in map(origin, node.all_input_nodes) if source.op == "placeholder"]
    return any(
        dtype_of(source) is torch.float32
        and not (parameter_name(source) or is_backward(source))
        and elements(source) < elements(node)
        for source in inputs
    )


def _carries(node: fx.Node) -> bool:
    """Whether a large operand makes a large result."""
    name = packet_name(node.target)
    is_scaling = name in ("mul", "div") and len(node.all_input_nodes) == 1
    return is_scaling or name in _SUMS or classify(node.target) is OpClass.EXACT


def _holds_exact_numbers(node: fx.Node, low: torch.dtype) -> bool:
    return all(math.isnan(number) or torch.tensor(number, dtype=low).item() == number for number in _numbers(node))


def _numbers(node: fx.Node) -> list[float]:
    """The numbers that an operation computes with (an integer is one only where it fills: most are dimensions)."""
    numbers = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, float)]
    if packet_name(node.target) in _FILLS:
        numbers += [float(arg) for arg in node.args if isinstance(arg, int)]
    return numbers
