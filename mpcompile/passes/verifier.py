"""The invariants every pass keeps, checked after each one that changed a graph.

1. The graph is well formed and every inserted cast's ``meta["val"]`` is true (dtype, shape).
2. Inputs are the same; outputs have the same number, shape, dtype and strides. Two kinds of output may change once:
   the one that takes the flags of loss scaling, and gradients that are asked for in fp32.
3. No output aliases an input, or another output, that it did not alias before.
4. No op mutates its arguments that did not before.
5. The matrix operands of a LOW op have one dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.passes.edit import run_fake
from mpcompile.passes.graph import (
    CAST,
    arguments,
    describe,
    dtype_of,
    module_path,
    output_of,
    source_line,
    tensor,
    viewed,
)
from mpcompile.passes.op_classes import OpClass, classify, roles_of
from mpcompile.passes.result import PassError
from mpcompile.passes.scaling import SCALING
from mpcompile.passes.wide_gradients import WIDE_GRADIENTS


@dataclass(frozen=True, slots=True)
class Signature:
    """What a graph promises to those around it; taken before a pass, compared after it."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: frozenset[tuple[int, str]]
    mutations: int


def signature(gm: fx.GraphModule) -> Signature:
    """The promises of a graph as it is now."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    outputs = tree_leaves(output_of(gm).args[0])
    open_ = _may_change(gm)
    return Signature(
        inputs=tuple(node.name for node in inputs),
        outputs=tuple("" if index in open_ else _layout(output) for index, output in enumerate(outputs)),
        aliases=frozenset(_aliases(outputs)),
        mutations=sum(_mutates(node) for node in gm.graph.nodes),
    )


def verify(before: Signature, gm: fx.GraphModule, pass_name: str) -> None:
    """Raise ``PassError`` where ``gm`` breaks an invariant after ``pass_name`` ran on the graph of ``before``."""
    gm.graph.lint()
    after = signature(gm)
    if before.inputs != after.inputs:
        raise PassError(f"{pass_name} changed the graph's inputs.")
    if len(before.outputs) != len(after.outputs):
        raise PassError(f"{pass_name} changed the number of outputs.")
    for index, (old, new) in enumerate(zip(before.outputs, after.outputs, strict=True)):
        if old != new:
            raise PassError(f"{pass_name} changed output {index} from {old} to {new}.")
    if after.aliases - before.aliases:
        index, root = min(after.aliases - before.aliases)
        raise PassError(f"{pass_name} made output {index} alias {root}, which it did not before.")
    if after.mutations != before.mutations:
        raise PassError(f"{pass_name} added or removed an operation that mutates its arguments.")
    for node in gm.graph.nodes:
        _check_node(node, pass_name)


def _may_change(gm: fx.GraphModule) -> set[int]:
    site = gm.meta.get(SCALING)
    return {*gm.meta.get(WIDE_GRADIENTS, ()), *([site.flags] if site is not None else [])}


def _layout(output: Any) -> str:
    value = tensor(output)
    if value is None:
        return "no tensor"
    stride = value.stride() if value.layout is torch.strided else None
    return f"{value.dtype} {tuple(value.shape)} strides {stride}"


def _aliases(outputs: list[Any]) -> Iterator[tuple[int, str]]:
    """The outputs that are views of a graph input or of an output before them, with what they are views of."""
    first: dict[fx.Node, int] = {}
    for index, output in enumerate(outputs):
        if isinstance(output, fx.Node):
            root = viewed(output)
            if root.op == "placeholder":
                yield index, root.name
            if first.setdefault(root, index) != index:
                yield index, f"output {first[root]}"


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _check_node(node: fx.Node, pass_name: str) -> None:
    if node.op != "call_function":
        return
    if CAST in node.meta:
        _check_value(node, pass_name)
    if classify(node.target) is not OpClass.LOW:
        return
    roles = roles_of(node.target)
    if roles is None:
        return
    operands = [
        dtype
        for name, value in arguments(node)
        if name in roles.operands
        for leaf in tree_leaves(value)
        if (dtype := dtype_of(leaf)) is not None and dtype.is_floating_point
    ]
    if len(Counter(operands)) > 1:
        found = " and ".join(sorted({str(dtype)[6:] for dtype in operands}))
        raise PassError(
            f"{pass_name} left {describe(node)} with {found} operands; they must have one dtype "
            f"({module_path(node) or 'no module'}, {source_line(node) or 'no source line'})."
        )


def _check_value(node: fx.Node, pass_name: str) -> None:
    found, true = tensor(node), run_fake(node)
    if found is None or found.dtype != true.dtype or found.shape != true.shape:
        raise PassError(
            f"{pass_name} left {describe(node)} with a recorded value of {_layout(node)}, "
            f"but it computes {true.dtype} {tuple(true.shape)}."
        )
