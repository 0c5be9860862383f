"""What it costs to keep the values of a graph in fp32 or in the low type: bytes moved, bytes held, roundings.

All costs are in bytes per element, so that no decision depends on a size that is dynamic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from mpcompile.passes.compute_plan import depending_on_input
from mpcompile.passes.exactness import beyond_range, sources
from mpcompile.passes.fusion import fuses, stages
from mpcompile.passes.graph import dtype_of, is_backward, is_cast, source_of_widening
from mpcompile.passes.minimum_cut import NEVER
from mpcompile.passes.readers import (
    accumulates,
    feeds_convolution,
    is_computed,
    is_later,
    is_moved,
    is_narrowing,
    keeps_signs,
    low_form,
    origin,
    readers_below,
    reads_sign,
    reads_unrounded,
)
from mpcompile.passes.saved_values import elements, predict_partition, size

_WIDE, _LOW = 4, 2
"""Bytes of an element."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What the parts of the energy are worth, in bytes moved; a preset is one of these."""

    held: float
    """One byte kept from forward to backward."""
    rounding: float
    """One rounding of a value that is read for more than gradients."""
    carried: float
    """One rounding of a value that is added into a stream of values, which carries it on to the end."""
    convolved: float
    """One rounding of a value that feeds a convolution: drowned by the many products that are summed there."""
    repeated: float
    """One rounding of the sum of values that were each rounded already."""
    gradient: float
    """One rounding of a value that only backward reads: it enters gradients once."""


PRESETS = {
    "default": Weights(held=1.0, rounding=8.0, carried=32.0, convolved=4.0, repeated=1.0, gradient=1.5),
    "accurate": Weights(held=1.0, rounding=NEVER, carried=NEVER, convolved=NEVER, repeated=NEVER, gradient=NEVER),
    "fast": Weights(held=1.0, rounding=1.0, carried=1.0, convolved=1.0, repeated=0.5, gradient=0.5),
}
"""``accurate`` keeps a value low only where that rounds nothing more."""

_OPERATIONS_PER_BYTE = {"cpu": 16, "cuda": 200}
"""Operations of a product that a device computes while it moves one byte: of a core with 256-bit vectors, of a GPU from
the A100 (312 TFLOPS / 1.6 to 2.0 TB/s) to the H100 (989 / 3.35)."""

_STATE = 16
"""Bytes that a trained element of a weight has anyway: master, gradient, and Adam's two moments in fp32."""


def rows_to_recast(device: str, weights: Weights) -> float:
    """From how many rows on a linear layer is so long that casting its weight anew in backward is worth its time.

    .. code-block:: text

        time:    (4 + 2) bytes moved / the layer's three products, 2 rows operations each = operations per byte / rows
        memory:  2 bytes held / the 16 that the element has anyway

    Both as shares of the layer's own, of equal worth where a byte held is worth a byte moved.
    """
    operations = _OPERATIONS_PER_BYTE.get(device, _OPERATIONS_PER_BYTE["cuda"])
    return operations * _STATE / (_LOW * weights.held)


@dataclass(frozen=True, slots=True)
class Value:
    """An fp32 value that the graph computes, its readers, and what storing it low changes, in bytes per element."""

    node: fx.Node
    sooner: tuple[fx.Node, ...]
    """Readers that may read the low form, but those of the next field."""
    later: tuple[fx.Node, ...]
    """Of a value of forward: readers in backward that may."""
    for_sooner: float
    """What changes in bytes where ``sooner`` read the low form, given that ``later`` do."""
    for_later: float
    """What changes in bytes, moved and held, where ``later`` read it."""
    rounding: float
    """Price of the rounding that all these readers then see."""
    rounding_later: float
    """Price of the rounding that ``later`` see where ``sooner`` see none."""


@dataclass(frozen=True, slots=True)
class _Readers:
    """The readers of a value apart from its low form."""

    sooner: tuple[fx.Node, ...]
    later: tuple[fx.Node, ...]
    must: tuple[fx.Node, ...]
    """Those that must read what was not rounded."""


class CostModel:
    """The costs of one joint or inference graph in which the operands of products are narrowed already."""

    def __init__(self, graph: fx.Graph, low: torch.dtype, weights: Weights, kept: set[fx.Node]) -> None:
        """``kept``: operations that the compute plan keeps in fp32; they read what was not rounded."""
        self._low = low
        self._weights = weights
        self._kept = kept
        self._varying = depending_on_input(graph)
        self._beyond = beyond_range(graph, low)
        self._stage = stages(graph)
        self._partition = predict_partition(graph, self._stage)
        self._backward_side = self._partition.recomputed | {node for node in graph.nodes if is_backward(node)}

    def value(self, node: fx.Node) -> Value | None:
        """What there is to decide about a node; None where it has no form but the one it has.

        Left alone: what is no fp32 value of the graph's own (inputs and parameters are in memory in fp32 whatever
        happens), what has no elements, what depends on no floating-point input (positions), what is read by more
        elements than it has (statistics, biases), and what may hold a number beyond the low type's range. In fp16 also
        what no product reads, unless it is a selection of such values: nothing says that it fits into fp16's range.
        """
        if dtype_of(node) is not torch.float32 or is_moved(node) or is_cast(node):
            return None
        if node.op != "call_function" or node not in self._varying or node in self._beyond or not elements(node):
            return None
        if self._low is torch.float16 and not low_form(node) and sources(node, self._low) != []:
            return None
        readers = self._readers(node)
        may = readers.sooner + readers.later
        if not may or any(elements(user) > elements(node) and not is_moved(user) for user in may):
            return None
        needed_anyway = not is_backward(node) and self._is_needed_anyway(node, readers)
        saving = self._bytes_of_saving(node, readers) if readers.later else 0.0
        return Value(
            node,
            readers.sooner,
            readers.later,
            for_sooner=self._bytes_of_storing(node, readers) + (saving if needed_anyway else 0.0),
            for_later=0.0 if needed_anyway else saving,
            rounding=0.0 if self._see_none(may) else self._rounding(node, readers),
            rounding_later=0.0 if self._see_none(readers.later) else self._weights.gradient,
        )

    def _readers(self, node: fx.Node) -> _Readers:
        wide = [user for user in node.users if not is_narrowing(user)]
        is_exact = sources(node, self._low) == []  # then even a comparison may read the low form
        may = [user for user in wide if (is_exact and is_computed(user)) or self._may_be_rounded(user)]
        later = [] if is_backward(node) else [user for user in may if is_later(user)]
        sooner = [user for user in may if user not in later]
        return _Readers(tuple(sooner), tuple(later), tuple(user for user in wide if user not in may))

    def _may_be_rounded(self, reader: fx.Node) -> bool:
        return not reads_unrounded(reader, self._kept) or self._see_none((reader,))

    def _see_none(self, readers: Iterable[fx.Node]) -> bool:
        """Whether a rounding changes nothing that readers see."""
        return keeps_signs(self._low) and all(map(reads_sign, readers))

    def _bytes_of_storing(self, node: fx.Node, readers: _Readers) -> float:
        """What changes in bytes moved where ``sooner`` reads the low form, besides what backward reads."""
        crossings = self._crossings(node, readers.sooner)
        no_longer_written = _WIDE if crossings and not self._crossings(node, readers.must) else 0
        narrowed = 0 if readers.later or low_form(node) else _LOW
        return narrowed - no_longer_written - crossings * (_WIDE - _LOW)

    def _bytes_of_saving(self, node: fx.Node, readers: _Readers) -> float:
        """What changes in bytes, moved and held, where all that backward reads of a value is its low form."""
        low = low_form(node)
        low_is_held = low is not None and low in self._partition.saved
        if node not in self._partition.saved | self._partition.recomputed:
            return self._bytes_instead_of_masks(node, readers.later)
        wide_is_held = any(map(is_later, readers.must))
        if node not in self._partition.saved and (low_is_held or wide_is_held):
            # Backward computes it anew, from something else that is read and held.
            return -_LOW * (1 + self._weights.held) if low_is_held else 0.0
        held = (0 if low_is_held else _LOW) - (0 if wide_is_held else self._held_for(node))
        is_written = node in self._partition.saved and not self._crossings(node, readers.sooner + readers.must)
        narrowed = 0 if low else _LOW
        return self._weights.held * held + narrowed - (_WIDE if is_written else 0) - (_WIDE - _LOW)

    def _bytes_instead_of_masks(self, node: fx.Node, later: tuple[fx.Node, ...]) -> float:
        """What changes where backward computes from the low form what forward makes of a value and saves: masks."""
        low = low_form(node)
        made = {below for reader in later for below in readers_below(reader)} & self._partition.saved
        masks = sum(map(size, made)) / elements(node)
        held = (0 if low in self._partition.saved else _LOW) - masks
        return self._weights.held * held + (0 if low else _LOW) + _LOW - 2 * masks

    def _held_for(self, node: fx.Node) -> float:
        """Bytes per element that are held for a value: its own, or those of what it alone is computed from anew."""
        if node in self._partition.saved:
            return _WIDE
        frontier, held = [node], 0
        while frontier:
            reader = frontier.pop()
            for source in reader.all_input_nodes:
                if set(source.users) & self._backward_side != {reader}:
                    continue  # held or computed for others too
                if source in self._partition.saved:
                    held += size(source)
                elif source in self._partition.recomputed:
                    frontier.append(source)
        return held / elements(node)

    def _is_needed_anyway(self, node: fx.Node, readers: _Readers) -> bool:
        """Whether backward computes something anew from the value itself, such as the operand of a weight gradient."""
        return any(user in self._partition.recomputed for user in node.users if user not in readers.later)

    def _crossings(self, node: fx.Node, readers: Iterable[fx.Node]) -> int:
        """How many later kernels read a value, itself or through views; readers of one stage share a kernel."""
        own = self._stage[node]
        computing = (user for reader in readers for user in readers_below(reader))
        return len({self._stage[user] for user in computing if self._stage[user] > own or not fuses(user)})

    def _rounding(self, node: fx.Node, readers: _Readers) -> float:
        # A convolutional net's time is the bytes of its activations, residual streams included.
        if feeds_convolution(low_form(node)):
            return self._weights.convolved
        if any(map(accumulates, readers.sooner)):
            return self._weights.carried
        return self._weights.repeated if _adds_rounded(node) else self._weights.rounding


def _adds_rounded(node: fx.Node) -> bool:
    operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
    return accumulates(node) and all(source_of_widening(origin(operand)) is not None for operand in operands)
