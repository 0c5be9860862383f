"""The rule that a search may give for an operation."""

from __future__ import annotations

from torch import fx

from mpcompile.passes.graph import module_path, packet_name
from mpcompile.passes.op_classes import OpClass, classify


def rule_for(node: fx.Node) -> str:
    """The rule that keeps an operation in fp32, or ``""`` for one that no rule of ours is for."""
    path = module_path(node)
    if not path and classify(node.target) is OpClass.LOW:
        return f"op:{packet_name(node.target)}"
    return path
