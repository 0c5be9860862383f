"""What goes into a graph and what comes out of it, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.passes.graph import LOW_COPY, is_backward, output_of, parameter_name
from mpcompile.passes.scaling import SCALING


def end_notes(gm: fx.GraphModule) -> dict[str, str]:
    """What each input is: ``parameter head.weight``, ``gradient of an output``, ``loss scale``."""
    inputs = gm.graph.find_nodes(op="placeholder")
    notes = {node.name: _input_note(node) for node in inputs}
    for node in inputs:
        if LOW_COPY in node.meta:
            notes[node.meta[LOW_COPY][0]] = f"low copy of {parameter_name(node)}, from the weight cache"
    if SCALING in gm.meta:
        notes[gm.meta[SCALING].scale] = "loss scale"
    return notes


def _input_note(node: fx.Node) -> str:
    if parameter := parameter_name(node):
        return f"parameter {parameter}"
    return "gradient of an output, from outside" if is_backward(node) else "input"


def returned_values(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, str, str, bool]]:
    """Every value a graph returns: its node, what it is, the parameter it is a gradient of, whether it is one at all.

    AOTAutograd describes what is returned in ``meta["desc"]``; a graph from elsewhere returns plain outputs.
    """
    inputs = {node.meta.get("desc"): node for node in gm.graph.find_nodes(op="placeholder")}
    output = output_of(gm)
    values = tree_leaves(output.args)
    described = output.meta.get("desc", ())
    descriptions = list(described) if len(described) == len(values) else [None] * len(values)
    flags = gm.meta[SCALING].flags if SCALING in gm.meta else None
    for position, (value, description) in enumerate(zip(values, descriptions, strict=True)):
        if position == flags:
            yield value, "overflow flags", "", True
        elif isinstance(value, fx.Node):
            yield (value, *_output_note(description, inputs))


def _output_note(description: Any, inputs: dict[Any, fx.Node]) -> tuple[str, str, bool]:
    if not getattr(description, "is_grad", bool)():
        return "output", "", False
    source = inputs.get(description.grad_of)
    parameter = parameter_name(source) if source is not None else ""
    return f"gradient of {parameter or 'an input'}", parameter, True
