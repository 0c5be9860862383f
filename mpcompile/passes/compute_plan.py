"""The compute plan: which operations of a graph read low operands, and the rule that decided each.

Pure: reads a graph and a policy, changes nothing. ``casts`` carries the plan out, the report shows it.
Precedence (first that applies): the user's region or request, an ``fp32`` rule, a ``low`` rule, shape and fp16's range,
the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.passes.gradient_role import gradient_roles, phases
from mpcompile.passes.graph import (
    KEPT,
    LOW_DTYPES,
    arguments,
    dtype_of,
    is_backward,
    is_cast,
    is_getitem,
    module_path,
    packet_name,
    parameter_name,
    subgraphs,
    tensor,
    user_op_name,
)
from mpcompile.passes.marks import read_marks
from mpcompile.passes.op_classes import (
    CHOSEN_FOR_FP32,
    RANKING_OPS,
    OpClass,
    Roles,
    classify,
    roles_of,
)
from mpcompile.passes.policy import Policy
from mpcompile.passes.range_guard import guard_range
from mpcompile.passes.rules import PHASES, Rule, op_names, require_match


@dataclass(frozen=True, slots=True)
class Decision:
    """How one operation computes, and why."""

    precision: str
    """``"low"``: operands are narrowed; ``"fp32"``: kept in fp32; ``"as traced"``: not touched."""
    rule: str
    """Who decided: ``user``, ``fp32 rule``, ``low rule``, ``shape``, ``range guard`` or ``class``."""
    reason: str
    """The sentence shown to the user."""


def plan_compute(gm: fx.GraphModule, policy: Policy) -> dict[fx.Node, Decision]:
    """Decide every operation of ``gm`` (its subgraphs are planned on their own)."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    varying = depending_on_input(gm.graph)
    roles = gradient_roles(gm.graph)
    return {node: _decide(node, policy, varying, phases(node, roles)) for node in calls}


def _decide(node: fx.Node, policy: Policy, varying: set[fx.Node], roles: set[str]) -> Decision:
    op_class = classify(node.target)
    if policy.is_fp32:
        return Decision("as traced", "policy", "the policy leaves everything in fp32")
    if policy.preset == "torch":
        return Decision("as traced", "policy", "torch.autocast decided when the graph was traced")
    asked = _asked_for(node, policy, roles)
    if asked is not None:
        if asked.precision == "low":
            return _low_on_request(node, op_class, asked)
        return asked
    if op_class is not OpClass.LOW:
        return Decision("as traced", "class", _CLASS_REASONS[op_class])
    return _decide_low(node, policy, varying)


_CLASS_REASONS = {
    OpClass.FP32: "reductions, normalisations, losses and steep functions compute in fp32",
    OpClass.FOLLOW: "elementwise: computed in fp32 inside its kernel",
    OpClass.EXACT: "moves or selects elements, no rounding of its own",
    OpClass.OPAQUE: "sees exactly the dtypes it was traced with; register_op() changes that",
}


def _asked_for(node: fx.Node, policy: Policy, roles: set[str]) -> Decision | None:
    for mark in read_marks(node):
        if PHASES[mark.phase] & roles:
            return Decision(mark.precision, mark.rule, mark.reason + _where(mark.phase, roles))
    for precision in ("fp32", "low"):
        for rule in policy.rules(precision):
            if rule.covers(roles) and _applies(rule, node):
                return Decision(precision, f"{precision} rule", f"rule {str(rule)!r}" + _where(rule.phase, roles))
    return None


def _applies(rule: Rule, node: fx.Node) -> bool:
    return any(rule.matches(name) for name in _names(rule.kind, node))


def _where(phase: str, roles: set[str]) -> str:
    """The role for which a rule with a phase decided."""
    return f", here {' and '.join(sorted(PHASES[phase] & roles))}" if phase else ""


def _names(kind: str, node: fx.Node) -> Iterable[str]:
    if kind == "module":
        return (module_path(node),)
    if kind == "op":
        user_op = user_op_name(node).removeprefix("aten.").split(".")[0]
        return op_names(packet_name(node.target)) | op_names(user_op)
    return (parameter_name(source) for source in _parameters_read(node))


def _parameters_read(node: fx.Node) -> Iterator[fx.Node]:
    """The parameters a node reads, views and casts of them included."""
    for source in node.all_input_nodes:
        while source.op == "call_function" and len(source.all_input_nodes) == 1:
            source = source.all_input_nodes[0]
        if source.op in ("placeholder", "get_attr"):
            yield source


def require_matches(gm: fx.GraphModule, policy: Policy) -> None:
    """Raise ``ValueError`` for a module or parameter rule that matches nothing, naming the nearest names."""
    for rule in policy.rules("fp32") + policy.rules("low"):
        # An operator may be absent from this graph and present in the next; its name is checked by Policy.
        if rule.kind == "op":
            continue
        graphs = [gm.graph, *(child.graph for _, child in subgraphs(gm))]
        nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
        require_match(rule, (name for node in nodes for name in _names(rule.kind, node)))


def _low_on_request(node: fx.Node, op_class: OpClass, asked: Decision) -> Decision:
    if op_class in (OpClass.EXACT, OpClass.OPAQUE) or is_cast(node):
        return Decision("as traced", "class", _CLASS_REASONS[op_class])
    if not any(dtype is torch.float32 for dtype in _operand_dtypes(node, None)):
        return Decision("as traced", "shape", "no float32 operand to narrow")
    return asked


def _decide_low(node: fx.Node, policy: Policy, varying: set[fx.Node]) -> Decision:
    if KEPT in node.meta:
        return Decision("fp32", "shape", node.meta[KEPT])
    name = packet_name(node.target)
    roles = roles_of(node.target)
    dtypes = set(_operand_dtypes(node, roles))
    if dtypes and dtypes <= set(LOW_DTYPES):
        return Decision("as traced", "class", "already in a 16-bit type where the graph enters")
    if not dtypes or not dtypes <= {torch.float32, policy.dtype}:
        return Decision("as traced", "shape", f"operands are {_dtype_list(dtypes)}")
    if name in CHOSEN_FOR_FP32:
        return Decision("fp32", "class", "kernel was chosen for fp32 before this pass")
    if roles is not None and _contraction(node, roles) == 1:
        return Decision("fp32", "shape", "contraction of size 1: a product, nothing to accumulate")
    if dict(arguments(node)).get("output_mask") == [False, False, True]:
        return Decision("fp32", "shape", "only the bias gradient of a convolution: a sum")
    if not any(operand in varying for operand in _operands(node, roles)):
        return Decision("fp32", "shape", "computed from constants alone (positions, frequencies)")
    if _only_ranked(node):
        return Decision("fp32", "shape", "only compared or ranked: rounding could change the order")
    beyond = guard_range(node, policy.dtype)
    if beyond is not None:
        return Decision("fp32", "range guard", beyond)
    return Decision("low", "class", "matmul, convolution or attention")


def _dtype_list(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "not floating-point"


def _operands(node: fx.Node, roles: Roles | None) -> Iterator[fx.Node]:
    for name, value in arguments(node):
        if roles is None or name in roles.operands:
            for leaf in tree_leaves(value):
                dtype = dtype_of(leaf)
                if dtype is not None and dtype.is_floating_point:
                    yield leaf


def _operand_dtypes(node: fx.Node, roles: Roles | None) -> Iterator[torch.dtype]:
    for operand in _operands(node, roles):
        dtype = dtype_of(operand)
        assert dtype is not None
        yield dtype


def _contraction(node: fx.Node, roles: Roles) -> Any:
    """The static size of the contracted dimension, or None where it is dynamic or unknown."""
    if roles.contraction is None:
        return None
    name, dim = roles.contraction
    value = tensor(dict(arguments(node)).get(name))
    if value is None or not value.dim():
        return None
    size = value.shape[dim]
    return size if isinstance(size, int) else None


def depending_on_input(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on a floating-point input or parameter of the graph."""
    reached: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            dtype = dtype_of(node)
            if node.op == "get_attr" or (dtype is not None and dtype.is_floating_point):
                reached.add(node)
        elif any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def _only_ranked(node: fx.Node) -> bool:
    """Whether forward reads a result only to rank or compare it (a codebook distance before ``argmin``).

    Backward readers do not count, so that training and evaluation decide alike.
    """
    seen: set[fx.Node] = set()
    frontier = [user for user in node.users if not is_backward(user)]
    if is_backward(node):
        return False
    ranked = False
    while frontier:
        user = frontier.pop()
        ranked = ranked or packet_name(user.target) in RANKING_OPS
        if user in seen or packet_name(user.target) in RANKING_OPS:
            continue
        if user.op == "output" or classify(user.target) in (OpClass.LOW, OpClass.OPAQUE):
            return False
        seen.add(user)
        readers = [reader for reader in user.users if not is_backward(reader)]
        if not readers and not is_getitem(user):
            return False
        frontier += readers
    return ranked
