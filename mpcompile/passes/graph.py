"""Reading nodes of an ATen graph: everything that looks into ``node.meta`` goes through here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
prims = torch.ops.prims

PARAMETER = "mixprec_parameter"
"""Key of ``node.meta`` of a placeholder: the name of the model's parameter that it is."""
LOW_COPY = "mixprec_low_copy"
"""Key of ``node.meta`` of a placeholder that is a parameter: the name of the placeholder that holds a copy of it in the
low type, and that type."""
EXACT = "mixprec_exact"
"""Key of ``node.meta`` of a narrowing that rounds nothing: its argument holds values of the low type."""
CAST = "mixprec_cast"
"""Key of ``node.meta`` of a cast that a pass inserted (the user's own casts do not have it)."""
KEPT = "mixprec_kept"
"""Key of ``node.meta`` of an operation that could not run low after all: the reason."""
DECOMPOSED = "mixprec_decomposed"
"""Key of ``gm.meta`` of a graph on its way to a code generator: nodes added now must be of its own vocabulary."""
MARK = "mixprec"
"""Key of ``node.meta["custom"]``: the user's intent, written before autograd (see ``intent``)."""

LOW_DTYPES = (torch.bfloat16, torch.float16)

_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.alias.default,
        aten.detach.default,
    }
)
"""Ops whose result holds every element of their input, at another shape or stride."""

_PARTIAL_VIEWS = frozenset((aten.slice.Tensor, aten.select.int, aten.clone.default, aten.contiguous.default))
"""Ops that move or drop elements: a cast moves above them only where the low form is there already."""

_TUPLE_VIEWS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int})

_CASTS = (prims.convert_element_type.default, aten._to_copy.default)


def tensor(node: Any) -> torch.Tensor | None:
    """The fake tensor a node stands for, or None where it is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def dtype_of(node: Any) -> torch.dtype | None:
    """The dtype of the tensor a node stands for, or None."""
    value = tensor(node)
    return None if value is None else value.dtype


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of its first argument that keeps all elements."""
    return node.target in _VIEWS


def viewed(node: fx.Node) -> fx.Node:
    """The node whose memory a node is a view of; itself where it is none."""
    while node.op == "call_function" and is_view(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def is_partial_view(node: fx.Node) -> bool:
    """Whether a node is a slice, a copy, or one piece of a split of its first argument."""
    if node.target in _PARTIAL_VIEWS:
        return True
    parent = node.args[0] if node.args else None
    return is_getitem(node) and isinstance(parent, fx.Node) and parent.target in _TUPLE_VIEWS


def is_getitem(node: fx.Node) -> bool:
    """Whether a node takes one output of an op with several."""
    return getattr(node.target, "__name__", "") == "getitem" and node.op == "call_function"


def is_tuple_view(node: fx.Node) -> bool:
    """Whether a node cuts its argument into several views."""
    return node.target in _TUPLE_VIEWS


def is_cast(node: fx.Node) -> bool:
    """Whether a node changes the dtype of its argument and nothing else (device, layout, memory format)."""
    if node.op != "call_function" or node.target not in _CASTS or dtype_of(node.args[0]) is None:
        return False
    return set(node.kwargs) <= {"dtype"}


def source_of_widening(node: fx.Node) -> fx.Node | None:
    """The 16-bit node that this node widens to fp32 (exactly), or None."""
    if is_cast(node) and dtype_of(node) is torch.float32 and dtype_of(node.args[0]) in LOW_DTYPES:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    return None


def is_backward(node: fx.Node) -> bool:
    """Whether a node belongs to the backward part of a joint graph."""
    tag = node.meta.get("partitioner_tag")
    return tag in ("is_backward", "must_be_in_backward") or bool(node.meta.get("autograd_backward"))


def op_name(node: fx.Node) -> str:
    """``aten.mm.default`` for an operator, the function's name otherwise."""
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def user_op_name(node: fx.Node) -> str:
    """The operator the user's code called, before decomposition (``aten.native_layer_norm.default``)."""
    original = node.meta.get("original_aten")
    return str(original) if original is not None else op_name(node)


def packet_name(target: Any) -> str:
    """``mm`` for ``aten.mm.default``, ``mylib::op`` for an op of another namespace, else the function's name."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return name.removeprefix("aten::").removeprefix("prims::")
    return str(getattr(target, "__name__", target))


_ROOT = re.compile(r"^(?:[LG]\['[^']*'\]|[LG]__\w+?___)\.?|^(?:self|mod)\.")
_INDEX = re.compile(r"(?:(?:^|\.)_(?:modules|parameters))?\[['\"]?([^'\"\]]+)['\"]?\]")


def normalise_path(path: str) -> str:
    """``layers.0.norm`` for the spellings of a module path that Dynamo and torch.export use.

    >>> normalise_path("L['self']._modules['layers'][0].norm")
    'layers.0.norm'
    """
    return _INDEX.sub(r".\1", _ROOT.sub("", path)).strip(".").replace("L['self']", "")


def module_path(node: fx.Node) -> str:
    """Path of the module whose code made this node (forward and backward nodes alike), or ``""``."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    return normalise_path(str(list(stack.values())[-1][0]))


def call_name(node: fx.Node) -> str:
    """The torch function or method the model called for this node, forward or backward (``linear``), or ``""``."""
    stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    if not stack:
        return ""
    name, called = stack[-1]
    if isinstance(called, type):  # a module of torch.nn, under the name of Dynamo's node for what it calls
        return re.sub(r"_\d+$", "", str(name))
    return str(getattr(called, "__name__", called))


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
"""Where a model made of torch's modules alone is called from, by ``explain``: no line of the user's."""


def source_line(node: fx.Node) -> str:
    """``model.py:41``, the innermost line of the user's code this node comes from, or ``""``."""
    frames = [f for f in _FRAME.findall(node.meta.get("stack_trace") or "") if not f[0].startswith(_PACKAGE)]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def parameter_name(node: fx.Node) -> str:
    """Name of the model's parameter that a graph input is (``layers.0.weight``), or ``""``."""
    # Graphs from torch.export say it themselves: ParamAOTInput(target="layers.0.weight").
    return str(node.meta.get(PARAMETER) or getattr(node.meta.get("desc"), "target", ""))


def describe(node: fx.Node) -> str:
    """A node for an error message: name, op, module path, source line."""
    where = ", ".join(filter(None, (module_path(node), source_line(node))))
    return f"{node.name} ({op_name(node)}{', ' + where if where else ''})"


def arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Name and value of every argument given to an operator call."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        yield from ((str(i), arg) for i, arg in enumerate(node.args))
    else:
        yield from zip((a.name for a in schema.arguments), node.args, strict=False)
    yield from node.kwargs.items()


def is_joint(graph: fx.Graph) -> bool:
    """Whether a graph holds forward and backward together."""
    return any(is_backward(node) for node in graph.find_nodes(op="placeholder"))


def subgraphs(gm: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """The graphs of the branches and bodies of higher-order ops (cond, scan, checkpoint, ...)."""
    for node in gm.graph.find_nodes(op="get_attr"):
        child = getattr(gm, str(node.target), None)
        if isinstance(child, fx.GraphModule):
            yield str(node.target), child


def output_of(gm: fx.GraphModule) -> fx.Node:
    """The output node of a graph."""
    (output,) = gm.graph.find_nodes(op="output")
    assert isinstance(output, fx.Node)
    return output
