"""Read what the user asked for off the graph before autograd, while it can still be seen.

Fp32 islands, explicit ``.float()`` requests, module paths and the origin of position tables vanish when autograd
traces and decomposition runs. This pass writes each decision as one string into ``node.meta["custom"]``, which
autograd copies to every ATen node, forward and backward, that comes from the marked one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.passes.graph import module_path, subgraphs
from mpcompile.passes.marks import Mark, mark_text, read_marks, write_marks
from mpcompile.passes.policy import Policy
from mpcompile.passes.range_guard import beyond_range
from mpcompile.passes.result import Change, PassResult
from mpcompile.passes.rules import Rule, op_names, require_match

MATMULS = frozenset(
    """matmul mm bmm addmm baddbmm addbmm mv addmv linear einsum bilinear tensordot inner chain_matmul conv1d conv2d
conv3d conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention flex_attention grouped_mm
_grouped_mm multi_head_attention_forward __matmul__ __rmatmul__""".split()
)
"""Torch-level calls that become LOW operators."""

VIEWS = frozenset(
    """view reshape transpose permute t unsqueeze squeeze expand expand_as contiguous flatten unflatten swapaxes
movedim __getitem__ getitem getattr chunk split mT""".split()
)
"""Torch-level calls that move elements."""

_BIASES = {"linear": 2, "bilinear": 3, "addmm": 0, "baddbmm": 0, "addbmm": 0, "addmv": 0} | {
    f"conv{kind}{dims}d": 2 for kind in ("", "_transpose") for dims in (1, 2, 3)
}


@dataclass(frozen=True, slots=True)
class Scope:
    """The names there are in the compiled model, of which a graph may see a part."""

    modules: frozenset[str] = frozenset()
    """Every module path of the compiled model; empty where what was compiled is a plain function."""
    parameters: frozenset[str] = frozenset()
    """Every parameter name of the compiled model."""


def read_intent(gm: fx.GraphModule, policy: Policy, scope: Scope, parameters: dict[str, str]) -> PassResult:
    """Mark every operation of a torch-level graph whose precision the user, or its inputs, decide.

    ``parameters`` maps placeholders to parameter names. The first that applies: an ``autocast(enabled=False)``
    region; a matmul all of whose matrix operands were explicitly asked for in fp32; an ``fp32`` rule; a ``low``
    rule; a matmul with no operand that depends on a parameter or needs a gradient; a matmul with a constant (a scale,
    an alpha) that fp16 cannot hold.

    Nothing under the preset ``"torch"``, where autocast decides. Raises ``ValueError`` for a rule that matches nothing,
    naming the nearest names.
    """
    if policy.preset == "torch":
        return PassResult("read_intent", ())
    _require_matches(gm, policy, scope, parameters)
    return PassResult("read_intent", tuple(_mark(gm, policy, parameters)))


def _mark(gm: fx.GraphModule, policy: Policy, parameters: dict[str, str]) -> Iterator[Change]:
    for _, child in subgraphs(gm):
        yield from _mark(child, policy, {})
    learned = _learned(gm)
    islands = _fp32_islands(gm)
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        marks = list(_marks(node, policy, parameters, islands, learned))
        write_marks(node, marks)
        for mark in marks:
            yield Change(node.name, call_name(node), "", mark.precision, mark.reason)


def _marks(
    node: fx.Node, policy: Policy, parameters: dict[str, str], islands: set[fx.Node], learned: set[fx.Node]
) -> Iterator[Mark]:
    """What is asked for of a node, up to the first mark that is for every phase."""
    for mark in (_requested(node, islands), *_ruled(node, policy, parameters), _fixed(node, learned, policy)):
        if mark is not None:
            yield mark
            if not mark.phase:
                return


def call_name(node: fx.Node) -> str:
    """Name of the function or method a torch-level node calls."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def is_marked_fp32(node: fx.Node) -> bool:
    """Whether a node must compute in fp32, forward or in backward, by a mark this pass wrote."""
    return any(mark.precision == "fp32" for mark in read_marks(node))


def _requested(node: fx.Node, islands: set[fx.Node]) -> Mark | None:
    if node in islands:
        return Mark("fp32", "user", "inside autocast(enabled=False)")
    if call_name(node) in MATMULS:
        operands = list(matrix_operands(node))
        if operands and all(_asked_for_fp32(operand) for operand in operands):
            return Mark("fp32", "user", "every operand was explicitly asked for in float32")
    return None


def _ruled(node: fx.Node, policy: Policy, parameters: dict[str, str]) -> Iterator[Mark]:
    for precision in ("fp32", "low"):
        for rule in policy.rules(precision):
            if any(rule.matches(name) for name in _names(rule, node, parameters)):
                yield Mark(precision, f"{precision} rule", f"rule {str(rule)!r}", rule.phase)


def _names(rule: Rule, node: fx.Node, parameters: dict[str, str]) -> Iterable[str]:
    if rule.kind == "module":
        return (module_path(node),)
    if rule.kind == "op":
        return op_names(call_name(node))
    return (parameters.get(source.name, "") for source in node.all_input_nodes)


def _fixed(node: fx.Node, learned: set[fx.Node], policy: Policy) -> Mark | None:
    if call_name(node) not in MATMULS:
        return None
    if not any(source in learned for source in node.all_input_nodes):
        return Mark("fp32", "shape", "no operand depends on a parameter or needs a gradient")
    constant = beyond_range(tree_leaves((node.args, node.kwargs)))
    if policy.dtype is torch.float16 and constant is not None:
        return Mark("fp32", "range guard", f"its constant {constant:g} is beyond float16")
    return None


def _learned(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes that depend on a parameter or on something that needs a gradient."""
    learned: set[fx.Node] = set()
    # In the body of a higher-order op the inputs do not say what they are: they count as learned.
    is_body = not any("grapharg" in node.meta for node in gm.graph.find_nodes(op="placeholder"))
    for node in gm.graph.nodes:
        if _is_source_of_learning(gm, node, is_body) or any(source in learned for source in node.all_input_nodes):
            learned.add(node)
    return learned


def _is_source_of_learning(gm: fx.GraphModule, node: fx.Node, is_body: bool) -> bool:
    if node.op == "placeholder":
        return is_body or _is_learnable(node.meta.get("example_value"))
    if node.op == "get_attr":
        return not isinstance(_attribute(gm, node), fx.GraphModule)
    # torch.func.grad makes its inputs differentiable inside the graph.
    return any(name in call_name(node) for name in ("wrap_for_grad", "create_differentiable"))


def _attribute(gm: fx.GraphModule, node: fx.Node) -> Any:
    return getattr(gm, str(node.target), None)


def _is_learnable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (isinstance(value, torch.nn.Parameter) or value.requires_grad)


def _fp32_islands(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes between entering and leaving ``autocast(enabled=False)`` of their own device."""
    islands: set[fx.Node] = set()
    open_regions: list[tuple[fx.Node, str, bool]] = []
    for node in gm.graph.nodes:
        if call_name(node) == "_enter_autocast":
            device, _, enabled = (*node.args, None, True)[:3]
            open_regions.append((node, str(device), bool(enabled)))
        elif call_name(node) == "_exit_autocast":
            open_regions = [region for region in open_regions if region[0] is not node.args[0]]
        elif open_regions:
            own = [enabled for _, device, enabled in open_regions if device in _devices(node)]
            if own and not own[-1]:
                islands.add(node)
    return islands


def _devices(node: fx.Node) -> set[str]:
    values = tree_leaves(node.meta.get("example_value"))
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def matrix_operands(node: fx.Node) -> Iterator[fx.Node]:
    """The floating-point operands of a matmul, biases apart."""
    bias = _BIASES.get(call_name(node))
    for index, arg in enumerate(node.args):
        if index == bias:
            continue
        yield from (leaf for leaf in tree_leaves(arg) if _is_floating(leaf))
    for name, arg in node.kwargs.items():
        if name not in ("bias", "attn_mask") and _is_floating(arg):
            assert isinstance(arg, fx.Node)
            yield arg


def _is_floating(arg: Any) -> bool:
    value = arg.meta.get("example_value") if isinstance(arg, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _asked_for_fp32(node: fx.Node) -> bool:
    """Whether a value is an explicit ``.float()`` or ``.to(torch.float32)``, seen through views."""
    while call_name(node) in VIEWS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    name = call_name(node)
    if name == "float":
        return True
    given = (*node.args[1:], *node.kwargs.values())
    return name in ("to", "type", "_to_copy") and torch.float32 in given


def _require_matches(gm: fx.GraphModule, policy: Policy, scope: Scope, parameters: dict[str, str]) -> None:
    here = {module_path(node) for node in gm.graph.nodes}
    ancestors = {path.rsplit(".", depth)[0] for path in here for depth in range(path.count(".") + 1)}
    known = {
        "module": scope.modules or here | ancestors,
        "param": scope.parameters or frozenset(parameters.values()),
    }
    for rule in policy.rules("fp32") + policy.rules("low"):
        if rule.kind in known:
            require_match(rule, known[rule.kind])


def where_marked(gm: fx.GraphModule) -> tuple[str, ...]:
    """Every mark in graph order, with its node: the resolved decisions, for the compile cache key."""
    marks = []
    for node in gm.graph.nodes:
        if mark := mark_text(node):
            marks.append(f"{node.name}={mark}")
    for name, child in subgraphs(gm):
        marks += [f"{name}/{mark}" for mark in where_marked(child)]
    return tuple(marks)
