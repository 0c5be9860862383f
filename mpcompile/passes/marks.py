"""The user's intent on its way through autograd: one string in ``node.meta["custom"]``, which autograd copies.

It is written before autograd, where the intent can be seen, and read on every ATen node, forward and backward, that
comes from the marked one. As autograd copies the same string to all of them, each mark says which of them it is for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from mpcompile.passes.graph import MARK


@dataclass(frozen=True, slots=True)
class Mark:
    """One decision about an operation, made before autograd."""

    precision: str
    """``"fp32"`` or ``"low"``."""
    rule: str
    """Who decided: ``user``, ``fp32 rule``, ``low rule``, ``shape`` or ``range guard``."""
    reason: str
    phase: str = ""
    """What it is for, as in a rule after ``@``; empty: forward and backward."""

    def __str__(self) -> str:
        phase = f"@{self.phase}" if self.phase else ""
        return f"{self.precision}{phase}|{self.rule}|{self.reason}"


def write_marks(node: fx.Node, marks: Iterable[Mark]) -> None:
    """Mark a node; of several marks for one phase the first decides."""
    text = "\n".join(map(str, marks))
    if text:
        node.meta["custom"] = {**(node.meta.get("custom") or {}), MARK: text}


def read_marks(node: fx.Node) -> list[Mark]:
    """The marks of a node, or of the one it comes from."""
    return [_read(line) for line in mark_text(node).splitlines()]


def mark_text(node: fx.Node) -> str:
    """The marks of a node as they are written; empty where it has none."""
    return str((node.meta.get("custom") or {}).get(MARK, ""))


def _read(line: str) -> Mark:
    precision, rule, reason = line.split("|", 2)
    precision, _, phase = precision.partition("@")
    return Mark(precision, rule, reason, phase)
