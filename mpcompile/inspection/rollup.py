"""Figures of a report by module: each module's are its own and those of everything inside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from mpcompile.inspection.report import Report
from mpcompile.passes.op_classes import OpClass

LOW = ("bfloat16", "float16")
"""The low types, as records spell them."""


@dataclass(slots=True)
class _Figures:
    operations: int = 0
    matmuls: int = 0
    low_matmuls: int = 0
    bytes: int = 0
    low_bytes: int = 0
    saved_bytes: int = 0
    saved_bytes_fp32: int = 0
    casts: int = 0
    cast_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModuleRollup:
    """What one module and all inside it computes, forward and backward; sizes that are dynamic count as 0 bytes."""

    path: str
    operations: int
    matmuls: int
    """How many of them are matmuls, convolutions and attentions."""
    low_matmuls: int
    """How many of those read 16-bit operands."""
    bytes: int
    """Bytes of what its operations make, views apart."""
    low_bytes: int
    """The part of them that is made in a 16-bit type."""
    saved_bytes: int
    """Bytes that forward keeps for backward, inputs and parameters apart, as predicted."""
    saved_bytes_fp32: int
    """The same of the model in fp32."""
    casts: int
    """Casts that the passes put in."""
    cast_bytes: int
    """Bytes that these casts read and write if none is fused into a kernel."""

    @property
    def low_share(self) -> float | None:
        """The part of its matmuls, convolutions and attentions that reads 16-bit operands; None where it has none."""
        return self.low_matmuls / self.matmuls if self.matmuls else None


def roll_up(report: Report) -> dict[str, ModuleRollup]:
    """The figures of all modules by path, in the order in which they first compute; ``""`` is the whole."""
    found: dict[str, _Figures] = {"": _Figures()}
    for node in report.nodes:
        is_matmul = node.op_class == OpClass.LOW.value
        for figures in _around(found, node.module):
            figures.operations += 1
            figures.matmuls += is_matmul
            figures.low_matmuls += is_matmul and any(dtype in LOW for dtype in node.inputs)
    for value in report.values:
        size = value.bytes or 0
        is_made = value.kind in ("operation", "added")
        for figures in _around(found, value.module):
            figures.bytes += size if is_made else 0
            figures.low_bytes += size if is_made and value.dtype in LOW else 0
            figures.saved_bytes += value.saved_bytes or 0
            figures.saved_bytes_fp32 += value.saved_bytes_fp32 or 0
    for cast in report.casts:
        for figures in _around(found, cast.module):
            figures.casts += 1
            figures.cast_bytes += cast.bytes or 0
    return {path: ModuleRollup(path, *_values(figures)) for path, figures in found.items()}


def _values(figures: _Figures) -> Iterator[int]:
    return (getattr(figures, field.name) for field in fields(figures))


def _around(found: dict[str, _Figures], path: str) -> Iterator[_Figures]:
    """The figures of a module and of all that contain it."""
    yield found[""]
    parts = path.split(".") if path else []
    for depth in range(1, len(parts) + 1):
        yield found.setdefault(".".join(parts[:depth]), _Figures())


def children(paths: Iterable[str]) -> dict[str, list[str]]:
    """The modules right inside each module, in order."""
    below: dict[str, list[str]] = {path: [] for path in paths}
    for path in below:
        if path:
            below[path.rpartition(".")[0]].append(path)
    return below
