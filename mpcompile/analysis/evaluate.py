"""Run one operation, or a whole graph, on real tensors: as it is, or in a wider precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from mpcompile.analysis.attention import attend, is_attention
from mpcompile.notices import MixprecError
from mpcompile.passes.graph import LOW_DTYPES, aten, describe, dtype_of, packet_name, prims, tensor
from mpcompile.passes.op_classes import OpClass, classify

Values = dict[str, Any]
"""The value of every node of a graph, by the node's name."""

_NARROW = (torch.float32, *LOW_DTYPES)


def run(
    gm: fx.GraphModule,
    inputs: Mapping[str, Any],
    wide: torch.dtype | None,
    draws: Values,
) -> Values:
    """Run ``gm`` node by node and keep every value.

    ``inputs``: value of every placeholder, by name; none is written to. ``wide``: None runs the graph as it is;
    a dtype computes every floating-point value that is narrower in that dtype, and rounds nothing.
    ``draws``: the results of random operations; what is missing is drawn and added, so that a later run replays it.
    """
    values: Values = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node.name] = widened(inputs[node.name], wide)
        elif node.op == "get_attr":
            values[node.name] = widened(_attribute(gm, str(node.target)), wide)
        elif node.op == "call_function":
            if is_random(node) and node.name not in draws:
                draws[node.name] = node.target(*traced(node, values)[0], **traced(node, values)[1])
            if is_random(node):
                values[node.name] = widened(draws[node.name], wide)
            else:
                args, kwargs = arguments_from(node, values)
                values[node.name] = evaluate(node, args, kwargs, wide)
        else:
            values[node.name] = arguments_from(node, values)[0]
    return values


def arguments_from(node: fx.Node, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node, with values in place of nodes."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: values[source.name])
    return args, kwargs


def widened(value: Any, wide: torch.dtype | None) -> Any:
    """``value`` with every floating-point tensor that is narrower than ``wide`` in that dtype."""
    if wide is None:
        return value
    return tree_map(lambda v: v.to(wide) if _is_narrower(v, wide) else v, value)


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers; what it draws is replayed, never drawn twice."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not is_attention(node)


def is_whole(node: fx.Node) -> bool:
    """Whether a node computes only in the dtypes it was traced with: a custom operator, the bits of a value, a
    higher-order op other than those in ``_NESTED``."""
    if node.target is aten.view.dtype:
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return packet_name(node.target) not in _NESTED
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    known = node.target.namespace in ("aten", "prims")
    return not known and classify(node.target) in (OpClass.OPAQUE, OpClass.LOW)


def is_unseen(node: fx.Node) -> bool:
    """Whether what a node rounds to 16 bits cannot be told, because it does so in a wide run as well."""
    if node.op != "call_function" or not is_whole(node):
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    return any(dtype_of(value) in LOW_DTYPES for value in (node, *node.all_input_nodes))


def evaluate(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], wide: torch.dtype | None) -> Any:
    """The result of one operation for these arguments.

    With ``wide``, in that precision: ``args`` are of it already, dtypes among them mean it. An operation that cannot
    compute in another precision (``is_whole``) is given the dtypes it was traced with.
    """
    if node.target is aten.copy_.default:  # the only mutation of a functional graph: its end, where inputs are updated
        return args[1].to(args[0].dtype).expand_as(args[0])
    if wide is None:
        return _call(node, args, kwargs)
    if is_whole(node):
        values = {source.name: value for source, value in _pairs(node, args, kwargs)}
        narrow_args, narrow_kwargs = traced(node, values)
        return widened(_call(node, narrow_args, narrow_kwargs), wide)
    if packet_name(node.target) in _NESTED and isinstance(node.target, torch._ops.HigherOrderOperator):
        return _run_body(node, *_NESTED[packet_name(node.target)](*args), wide)
    args, kwargs = tree_map(lambda v: wide if isinstance(v, torch.dtype) and v in _NARROW else v, (args, kwargs))
    if is_attention(node):
        return attend(node, args, kwargs)
    substitute = _SUBSTITUTES.get(str(node.target))
    return widened(substitute(*args, **kwargs) if substitute else _call(node, args, kwargs), wide)


def traced(node: fx.Node, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node in the dtypes they had when the graph was made."""

    def narrowed(source: fx.Node) -> Any:
        value, like = values[source.name], tensor(source)
        return value.to(like.dtype) if isinstance(value, Tensor) and like is not None else value

    args, kwargs = map_arg((node.args, node.kwargs), narrowed)
    return args, kwargs


def _is_narrower(value: Any, wide: torch.dtype) -> bool:
    if not isinstance(value, Tensor) or value.dtype not in _NARROW:
        return False
    return torch.finfo(value.dtype).eps > torch.finfo(wide).eps


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    found: Any = gm
    for name in target.split("."):
        found = getattr(found, name)
    return found


def _pairs(node: fx.Node, args: Any, kwargs: Any) -> list[tuple[fx.Node, Any]]:
    """Every node among the arguments, with the value that stands in its place."""
    pairs: list[tuple[fx.Node, Any]] = []

    def walk(spec: Any, value: Any) -> None:
        if isinstance(spec, fx.Node):
            pairs.append((spec, value))
        elif isinstance(spec, (list, tuple)):
            for inner, found in zip(spec, value, strict=True):
                walk(inner, found)
        elif isinstance(spec, dict):
            for key, inner in spec.items():
                walk(inner, value[key])

    walk((node.args, node.kwargs), (args, kwargs))
    return pairs


def _call(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _run_body(node: fx.Node, body: fx.GraphModule, operands: Sequence[Any], wide: torch.dtype) -> Any:
    names = [inner.name for inner in body.graph.find_nodes(op="placeholder")]
    (output,) = body.graph.find_nodes(op="output")
    draws: Values = {}
    (result,) = run(body, dict(zip(names, operands, strict=True)), wide, draws)[output.name]
    if draws:
        raise MixprecError(
            f"{describe(node)} draws random numbers in a graph of its own, where they cannot be replayed in another "
            "precision. Compare the model in eval mode, or without that part."
        )
    return result


_NESTED: dict[str, Callable[..., tuple[fx.GraphModule, Sequence[Any]]]] = {
    "invoke_subgraph": lambda body, _, *operands: (body, operands),
    "cond": lambda condition, true, false, operands: (true if condition else false, operands),
}
"""Higher-order ops that run one body once: from the arguments of the call, the body and its operands."""


def _convert(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype)


def _matmul_to(first: Tensor, second: Tensor, _: torch.dtype) -> Tensor:
    return first @ second


def _softmax(value: Tensor, dim: int, _: bool) -> Tensor:
    return torch.softmax(value, dim)


def _log_softmax(value: Tensor, dim: int, _: bool) -> Tensor:
    return torch.log_softmax(value, dim)


def _max_pool(value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    pool = torch.nn.functional.max_pool2d if len(settings[0]) == 2 else torch.nn.functional.max_pool3d
    with torch.no_grad():
        _, offsets = prims._low_memory_max_pool_with_offsets.default(value, *settings)
    return pool(value, *settings), offsets


_SUBSTITUTES: dict[str, Callable[..., Any]] = {
    "prims.convert_element_type.default": _convert,  # has no derivative
    "prims._low_memory_max_pool_with_offsets.default": _max_pool,  # nor has this
    "aten.view.default": torch.reshape,  # a formula may return other strides than the kernel it stands for
    "aten.mm.dtype": _matmul_to,  # only for 16-bit operands
    "aten._softmax.default": _softmax,  # may be told that its operand is 16 bits
    "aten._log_softmax.default": _log_softmax,
}
"""What computes an operation in wide precision, differentiably, where the operator itself does not."""


def floating(value: Any) -> list[Tensor | None]:
    """The results of a node in order; None in place of what is not floating-point."""
    return [leaf if isinstance(leaf, Tensor) and leaf.is_floating_point() else None for leaf in tree_leaves(value)]
