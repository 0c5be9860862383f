"""A graph as text, one line per node, with dtypes and shapes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.passes.graph import is_backward, op_name, subgraphs

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
}


def short_dtype(dtype: torch.dtype) -> str:
    """``bf16`` for ``torch.bfloat16``."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def graph_text(gm: fx.GraphModule) -> str:
    """The graph, forward above and backward below a line that separates them; subgraphs after it.

    >>> mm: f32[4, 8] = aten.mm.default(x, w)
    """
    return "\n".join(_lines(gm, ""))


def _lines(gm: fx.GraphModule, indent: str) -> Iterator[str]:
    in_backward = False
    for node in gm.graph.nodes:
        if is_backward(node) and node.op != "placeholder" and not in_backward:
            in_backward = True
            yield f"{indent}# backward"
        yield indent + _line(node)
    for name, child in subgraphs(gm):
        yield f"{indent}# subgraph {name}"
        yield from _lines(child, indent + "    ")


def _line(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"{node.name}: {_value(node)} = input"
    args = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    if node.op == "output":
        return f"return {args}"
    target = str(node.target) if node.op == "get_attr" else op_name(node)
    return f"{node.name}: {_value(node)} = {target}({args})"


def _value(node: fx.Node) -> str:
    values = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return ", ".join(f"{short_dtype(v.dtype)}{list(v.shape)}" for v in values) or "?"


def defined_name(line: str) -> str | None:
    """The node that a line of ``graph_text`` is about: ``output`` for what is returned, None for a heading."""
    line = line.lstrip()
    if line.startswith("#"):
        return None
    return "output" if line.startswith("return ") else line.partition(": ")[0]
