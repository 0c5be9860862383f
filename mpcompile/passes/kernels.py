"""Cast around the calls whose kernel torch chooses by dtype, before autograd traces them.

Flash and cuDNN attention take 16-bit operands only; once autograd has traced an fp32 call, the slower fp32 kernel
is in the graph for good. These casts are ordinary ``.to`` calls of the torch-level graph, so autograd gives them
their backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from mpcompile.passes.intent import VIEWS, call_name, is_marked_fp32
from mpcompile.passes.policy import Policy
from mpcompile.passes.range_guard import BEYOND_RANGE, beyond_range
from mpcompile.passes.result import Change, PassResult

_ATTENTION = ("query", "key", "value")
_OPERANDS: dict[str, tuple[str, ...]] = {
    "scaled_dot_product_attention": _ATTENTION,
    "flex_attention": _ATTENTION,
    "grouped_mm": ("mat_a", "mat_b"),
    "_grouped_mm": ("self", "mat2"),
}
"""Names of the first arguments, all of which are narrowed together."""


def lower_kernels(gm: fx.GraphModule, policy: Policy) -> PassResult:
    """Narrow the operands of attention and grouped matmuls, widen their result.

    before:  out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    after:   out = scaled_dot_product_attention(q.to(bf16), k.to(bf16), v.to(bf16), attn_mask=...).to(float32)

    Legal because these kernels accumulate in fp32 and the result has its traced dtype again. Leaves alone: calls
    marked fp32 by ``read_intent``, calls with an operand that is not fp32 or is beyond fp16's range, boolean
    masks, masks that need a gradient, and masks on a CPU, whose kernel reads an fp32 mask beside low operands.
    """
    changes = []
    for node in list(gm.graph.nodes):
        operands = _operands(node)
        # Under the preset "torch" autocast casts these calls itself.
        if policy.is_fp32 or policy.preset == "torch" or not operands or is_marked_fp32(node):
            continue
        if any(_dtype(operand) is not torch.float32 for operand in operands.values()):
            continue
        if policy.dtype is torch.float16 and any(map(_is_beyond_range, operands.values())):
            continue
        _narrow(node, operands, policy.dtype)
        _widen_result(node)
        low = str(policy.dtype)[6:]
        changes.append(Change(node.name, call_name(node), "float32", low, "kernel is chosen by dtype"))
    return PassResult("lower_kernels", tuple(changes))


def _is_beyond_range(node: fx.Node) -> bool:
    """Whether an operand is a parameter, or filled with a number, that fp16 cannot hold."""
    while call_name(node) in VIEWS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    fills = "full" in call_name(node) or "fill" in call_name(node)
    return BEYOND_RANGE in node.meta or (fills and beyond_range((*node.args, *node.kwargs.values())) is not None)


def _operands(node: fx.Node) -> dict[str | int, Any]:
    names = _OPERANDS.get(call_name(node), ()) if node.op == "call_function" else ()
    if len(node.args) + len(node.kwargs) < len(names):
        return {}
    by_position: dict[str | int, Any] = dict(enumerate(node.args[: len(names)]))
    by_name: dict[str | int, Any] = {name: node.kwargs[name] for name in names if name in node.kwargs}
    return {**by_position, **by_name} if len(by_position) + len(by_name) == len(names) else {}


def _dtype(arg: Any) -> torch.dtype | None:
    value = arg.meta.get("example_value") if isinstance(arg, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _narrow(node: fx.Node, operands: dict[str | int, Any], low: torch.dtype) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        for key, operand in operands.items():
            _set_argument(node, key, _call(graph.call_method, "to", (operand, low), node))
        _narrow_mask(node, low)


def _narrow_mask(node: fx.Node, low: torch.dtype) -> None:
    if call_name(node) != "scaled_dot_product_attention":
        return
    key: str | int = "attn_mask" if "attn_mask" in node.kwargs else 3
    mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    value = mask.meta.get("example_value") if isinstance(mask, fx.Node) else None
    if value is None or value.dtype is not torch.float32:
        return
    if value.requires_grad or value.device.type == "cpu":
        return
    # finfo(float32).min would round to -inf, and a row that is all -inf has no softmax.
    graph, least = node.graph, torch.finfo(low).min
    clamped = _call(graph.call_function, torch.clamp_min, (mask, least), node)
    infinite = _call(graph.call_function, torch.isinf, (mask,), node)
    finite = _call(graph.call_function, torch.where, (infinite, mask, clamped), node)
    _set_argument(node, key, _call(graph.call_method, "to", (finite, low), node))


def _widen_result(node: fx.Node) -> None:
    """Widen the result, or the first of several (the others are statistics, fp32 already)."""
    result = node
    if not isinstance(node.meta.get("example_value"), torch.Tensor):
        first = [u for u in node.users if call_name(u) == "getitem" and u.args[1] == 0]
        if not first:
            return
        result = first[0]
    graph = node.graph
    with graph.inserting_after(result):
        wide = graph.call_method("to", (result, torch.float32))
    _inherit(wide, node)
    wide.meta["example_value"] = result.meta.get("example_value")
    result.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


def _set_argument(node: fx.Node, key: str | int, value: fx.Node) -> None:
    if isinstance(key, int):
        node.update_arg(key, value)
    else:
        node.update_kwarg(key, value)


def _call(create: Callable[[Any, tuple[Any, ...]], fx.Node], target: Any, args: Any, like: fx.Node) -> fx.Node:
    node = create(target, args)
    _inherit(node, like)
    node.meta["example_value"] = _run_fake(node)
    return node


def _inherit(node: fx.Node, like: fx.Node) -> None:
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack", "custom"):
        if key in like.meta:
            node.meta[key] = like.meta[key]


def _run_fake(node: fx.Node) -> Any:
    args = tree_map(lambda a: a.meta["example_value"] if isinstance(a, fx.Node) else a, node.args)
    with args[0].fake_mode:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:])
        assert callable(node.target)
        return node.target(*args)
