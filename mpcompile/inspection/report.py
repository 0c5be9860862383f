"""The report of a compiled graph, as data: every operation with its precision and the rule that decided it.

``recorder`` makes it, ``terminal``, ``page`` and ``text_diff`` show it, ``serialisation`` writes it as JSON, ``store``
keeps it for other processes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import fx

from mpcompile.passes.op_classes import OpClass
from mpcompile.passes.result import PassResult

if TYPE_CHECKING:
    from mpcompile.inspection.rollup import ModuleRollup


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One operation of the graph as it runs."""

    name: str
    op: str
    """Operator in the graph, e.g. ``aten.addmm.default``."""
    user_op: str
    """Operator the model called, before decomposition, e.g. ``aten.native_layer_norm.default``."""
    op_class: str
    """``low``, ``fp32``, ``follow``, ``exact`` or ``opaque``."""
    inputs: tuple[str, ...]
    """Dtypes of the tensor operands as they are read."""
    output: str
    """Dtype of the (first) result."""
    precision: str
    """``low``, ``fp32`` or ``as traced``."""
    rule: str
    """Who decided: ``user``, ``fp32 rule``, ``low rule``, ``shape``, ``range guard`` or ``class``."""
    reason: str
    module: str
    """Module path, from the compiled model's root."""
    source: str
    """``file:line`` of the model's code."""
    direction: str
    """``forward`` or ``backward``."""
    call: str = ""
    """Function of torch that the model called, e.g. ``linear``; ``""`` where it is not known."""


@dataclass(frozen=True, slots=True)
class CastRecord:
    """One cast that the passes put in."""

    name: str
    value: str
    """Name of the value that is cast."""
    before: str
    after: str
    bytes: int | None
    """Bytes read plus bytes written when it stands alone; fused into a kernel it costs fewer. None: dynamic shape."""
    parameter: str
    """Name of the parameter that is cast, or ``""``."""
    module: str
    """Path of the module whose code made the value, or that holds the parameter."""
    direction: str


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """One node of the graph as it is handed on, whatever it is: what a picture of the graph is drawn from."""

    name: str
    kind: str
    """``input``, ``operation``, ``view`` (or a piece or copy), ``cast`` (put in by a pass), ``added`` (by a pass
    too: what scales the loss) or ``output``."""
    op: str
    """Operator in the graph; ``""`` for inputs and outputs."""
    dtype: str
    """Dtype of the (first) result, ``""`` where it is no tensor."""
    shape: tuple[int | str, ...]
    """Sizes of the (first) result; a dynamic one is an expression such as ``"s0"``."""
    bytes: int | None
    """Bytes of all its results; a view's are those of what it shows. None: dynamic shape."""
    reads: tuple[str, ...]
    """Names of the values it reads."""
    module: str
    """Path of the module whose code made it, or that holds the parameter or whose gradient it is."""
    direction: str
    """``forward`` or ``backward``."""
    rounds: bool
    """Whether its elements are rounded to a 16-bit type here."""
    saved_bytes: int | None
    """Bytes that forward keeps of it for backward, as predicted (``passes.saved_values``); 0 for inputs, which are
    there anyway. None: dynamic shape."""
    saved_bytes_fp32: int | None
    """The same of the model in fp32."""
    note: str
    """What it is for, where its operation does not say so: ``gradient of head.weight``, ``low form of gelu``."""


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One graph: forward and backward together, or an inference graph, or the body of a higher-order op."""

    nodes: tuple[NodeRecord, ...]
    casts: tuple[CastRecord, ...]
    results: tuple[PassResult, ...]
    before: str
    """The graph as it came from autograd, as text with dtypes."""
    after: str
    """The graph as it was handed on."""
    values: tuple[ValueRecord, ...] = ()
    """Every node of the graph as it was handed on, in its order, then its outputs."""


@dataclass(frozen=True)
class Report:
    """What mixprec decided for a compiled model, or for one of its graphs."""

    dtype: str
    """The low type in use."""
    graphs: tuple[GraphReport, ...]
    modules: tuple[tuple[fx.GraphModule, fx.GraphModule], ...] = dataclasses.field(
        default=(), compare=False, repr=False
    )
    """The graphs before and after, as FX; empty for a report that came from the compile cache."""
    preset: str = "default"
    """The preset of the policy."""

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """The operations of all graphs."""
        return tuple(node for graph in self.graphs for node in graph.nodes)

    @property
    def casts(self) -> tuple[CastRecord, ...]:
        """The inserted casts of all graphs."""
        return tuple(cast for graph in self.graphs for cast in graph.casts)

    @property
    def values(self) -> tuple[ValueRecord, ...]:
        """Every node of all graphs as they run: inputs, operations, views, casts, outputs."""
        return tuple(value for graph in self.graphs for value in graph.values)

    @property
    def saved_bytes(self) -> int | None:
        """Bytes kept from forward to backward, inputs and parameters apart, as predicted; None for dynamic shapes."""
        return _total(value.saved_bytes for value in self.values)

    @property
    def saved_bytes_fp32(self) -> int | None:
        """The same without the passes: what the model keeps in fp32."""
        return _total(value.saved_bytes_fp32 for value in self.values)

    @property
    def rollups(self) -> Mapping[str, ModuleRollup]:
        """Figures of every module with all it contains, by path; ``""`` is the whole model. In order of execution."""
        from mpcompile.inspection.rollup import roll_up

        return roll_up(self)

    def matmuls(self) -> tuple[NodeRecord, ...]:
        """The operations that may run low: matmuls, convolutions, attention."""
        return tuple(node for node in self.nodes if node.op_class == OpClass.LOW.value)

    def within(self, pattern: str) -> Report:
        """The part of the report that is about some modules: ``"layers.3"``, ``"layers.*.norm"``, and all inside them.

        Whatever shows a report shows the part alike. Raises ``ValueError`` for a pattern that matches no module.
        """
        from mpcompile.inspection.narrowing import narrow

        return narrow(self, pattern)

    def summary(self) -> str:
        """A few lines: how much runs low, what does not and why, the casts and their bytes, what backward keeps."""
        from mpcompile.inspection.terminal import summary

        return summary(self)

    def __str__(self) -> str:
        from mpcompile.inspection.terminal import render

        return render(self)

    def diff(self, context: int = 2) -> str:
        """The graphs before and after as text: the lines that differ, by module, ``context`` others around them.

        Lines are at most 100 columns wide. Modules that changed alike (the layers of a stack) are shown once.
        """
        from mpcompile.inspection.text_diff import diff

        return diff(self, context)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one HTML file, which needs no network; returns its path."""
        from mpcompile.inspection.page import page

        file = Path(path)
        file.write_text(page(self), encoding="utf-8")
        return file

    def to_json(self) -> str:
        """The report without the FX graphs; ``Report.from_json`` reads it back."""
        from mpcompile.inspection.serialisation import write

        return write(self)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what ``to_json`` wrote. Raises ``ValueError`` for anything else, other versions' reports included."""
        from mpcompile.inspection.serialisation import read

        return read(text)


def _total(parts: Iterable[int | None]) -> int | None:
    total = 0
    for part in parts:
        if part is None:
            return None
        total += part
    return total
