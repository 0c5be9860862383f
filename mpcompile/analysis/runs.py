"""The values of one graph in three precisions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from mpcompile.analysis.evaluate import Values


@dataclass(slots=True)
class Runs:
    """The values of one graph in three precisions, by node name."""

    gm: fx.GraphModule
    mixed: Values
    single: Values
    """In fp32: the same operations, casts without effect."""
    wide: Values
    """In fp64."""
