"""Carry out the compute plan: narrow the operands of low operations, widen their results.

``insert_casts`` puts the casts in, ``fold_casts`` takes out those that turned out to be no-ops. One narrowing
per value: above its views, shared by all who need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from mpcompile.passes.bias_gradient import keep_bias_gradient
from mpcompile.passes.compute_plan import plan_compute
from mpcompile.passes.cost_model import PRESETS, Weights
from mpcompile.passes.edit import insert_cast, insert_view, refresh, replace_arguments
from mpcompile.passes.gradient_role import gradient_roles
from mpcompile.passes.graph import (
    CAST,
    KEPT,
    LOW_DTYPES,
    dtype_of,
    is_cast,
    is_getitem,
    is_joint,
    is_partial_view,
    is_tuple_view,
    is_view,
    op_name,
    source_of_widening,
    tensor,
)
from mpcompile.passes.low_copies import exact_source, low_copy, note_low_copies
from mpcompile.passes.op_classes import roles_of
from mpcompile.passes.policy import Policy
from mpcompile.passes.result import Change, PassResult
from mpcompile.passes.weight_recasting import recast_weights
from mpcompile.passes.wide_products import EMULATED, WIDE, leave_wide, leaves_wide


def insert_casts(gm: fx.GraphModule, policy: Policy) -> PassResult:
    """Narrow the operands of every operation planned low and widen its result.

    before:  mm = aten.mm(x, w)                        # f32
    after:   x_low = convert(x, bf16); w_low = convert(w, bf16)
             mm = aten.mm(x_low, w_low)                # bf16, accumulated in fp32
             mm_wide = convert(mm, f32)                # every reader of mm reads this

    Legal because the plan admits only operations that accumulate in fp32, and the graph keeps its output dtypes.
    Leaves alone: operands of another dtype than fp32 (integers, fp64, the other 16-bit type), operations the plan
    keeps in fp32, and operations whose low kernel would lay out its result differently.
    """
    narrowing = _Narrowing(policy.dtype, is_joint(gm.graph))
    emulated = EMULATED in gm.meta
    roles = gradient_roles(gm.graph)
    changes: list[Change] = []
    for node, decision in plan_compute(gm, policy).items():
        if decision.precision == "low" and WIDE not in node.meta:  # as an earlier run left it
            wide = leaves_wide(node, roles[node], policy, emulated=emulated)
            changes += _lower(node, narrowing, decision.reason, PRESETS[policy.preset])
            if wide and KEPT not in node.meta:
                changes.append(_leave_wide(node, narrowing, emulated))
        elif _narrows_from_fp32(node):
            changes += _share_narrowing(node, policy)
    return PassResult("insert_casts", (*narrowing.changes(), *note_low_copies(gm), *changes))


def _lower(node: fx.Node, narrowing: _Narrowing, reason: str, weights: Weights) -> list[Change]:
    roles = roles_of(node.target)
    keep_bias_gradient(node)
    old_args, old_kwargs, old_value = node.args, node.kwargs, node.meta["val"]

    def narrow(name: str, value: Any) -> Any:
        if roles is not None and name not in roles.operands:
            return value
        return map_arg(value, lambda a: narrowing.low(a) if _is_fp32(a) else a)

    replace_arguments(node, narrow)
    refresh(node)
    if not _same_layout(old_value, node.meta["val"]):
        # The low kernel orders its result differently; readers were traced with the fp32 kernel's strides.
        node.args, node.kwargs = old_args, old_kwargs
        refresh(node)
        node.meta[KEPT] = "the low kernel lays out its result differently"
        return []
    if narrowing.joint:
        recast_weights(node, weights)
    for result in _results(node):
        if dtype_of(result) in LOW_DTYPES:
            _widen(result)
    return [Change(node.name, op_name(node), "float32", str(narrowing.dtype)[6:], reason)]


def _leave_wide(node: fx.Node, narrowing: _Narrowing, emulated: bool) -> Change:
    low = str(narrowing.dtype)[6:]
    reason = leave_wide(node, narrowing.widened, emulated=emulated)
    return Change(node.name, op_name(node), f"{low} x {low} -> {low}", f"{low} x {low} -> float32", reason)


def _is_fp32(node: fx.Node) -> bool:
    return dtype_of(node) is torch.float32


def _results(node: fx.Node) -> list[fx.Node]:
    """The tensors an operation returns: itself, or its getitems (whose values are refreshed here)."""
    if tensor(node) is not None:
        return [node]
    items = [user for user in node.users if is_getitem(user)]
    for item in items:
        index = item.args[1]
        assert isinstance(index, int)
        item.meta["val"] = node.meta["val"][index]
        item.meta.pop("tensor_meta", None)
    return items


def _same_layout(old: Any, new: Any) -> bool:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return old.shape == new.shape and old.stride() == new.stride()
    if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)):
        return all(_same_layout(a, b) for a, b in zip(old, new, strict=True))
    return True


def _widen(result: fx.Node) -> None:
    wide = insert_cast(result, torch.float32)
    result.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


def _narrows_from_fp32(node: fx.Node) -> bool:
    return is_cast(node) and dtype_of(node) in LOW_DTYPES and _is_fp32(_argument(node))


def _argument(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _share_narrowing(node: fx.Node, policy: Policy) -> list[Change]:
    """Read a value's low form, where it is there for nothing, in place of casting it again.

    The value is the same: widening is exact, and rounding commutes with moving elements.
    """
    dtype = dtype_of(node)
    assert dtype is not None
    free = _free_low_form(_argument(node), dtype)
    if free is None or _would_alias(node, free):
        return []
    node.replace_all_uses_with(free)
    return [Change(node.name, op_name(node), "float32", "", "its argument was low already")]


class _Narrowing:
    """The one low form of every value that needs one."""

    def __init__(self, dtype: torch.dtype, joint: bool) -> None:
        self.dtype = dtype
        self.joint = joint
        self._casts: list[fx.Node] = []
        self._low: dict[fx.Node, fx.Node] = {}
        self._wide: dict[fx.Node, fx.Node] = {}

    def low(self, node: fx.Node) -> fx.Node:
        """The low form of an fp32 value, made above its views where it has any."""
        if node not in self._low:
            self._low[node] = _free_low_form(node, self.dtype) or self._make(node)
        return self._low[node]

    def widened(self, low: fx.Node) -> fx.Node:
        """A low value as an operand of an fp32 kernel."""
        if low not in self._wide:
            made = (user for user in low.users if CAST in user.meta and source_of_widening(user))
            self._wide[low] = exact_source(low) or next(made, None) or insert_cast(low, torch.float32)
        return self._wide[low]

    def _make(self, node: fx.Node) -> fx.Node:
        if is_view(node) and _is_fp32(_argument(node)):
            low = insert_view(node, self.low(_argument(node)))
        else:
            low = insert_cast(node, self.dtype)
            self._casts.append(low)
        return low

    def changes(self) -> Iterator[Change]:
        """The casts that were made, except those for an operation that had to stay in fp32 after all."""
        for low in filter(_is_read, self._casts):
            yield Change(low.name, op_name(low), "", str(self.dtype)[6:], f"low form of {_argument(low).name}")


def _is_read(node: fx.Node) -> bool:
    return any(not is_view(user) or _is_read(user) for user in node.users)


def _free_low_form(node: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """A low node of exactly the same values, where a chain of views leads to one or to a widening; else None."""
    copy = low_copy(node, dtype)
    if copy is not None:
        return copy
    if source_of_widening(node) is not None:
        source = _widened(node)
        return source if dtype_of(source) is dtype else None
    if is_getitem(node) and is_partial_view(node):
        return _free_piece(node, dtype)
    if not (is_view(node) or is_partial_view(node)) or not _is_fp32(_argument(node)):
        return None
    base = _free_low_form(_argument(node), dtype)
    return None if base is None else insert_view(node, base)


def _free_piece(item: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """The same piece of a split of the low form."""
    split = _argument(item)
    if not is_tuple_view(split):
        return None
    base = _free_low_form(_argument(split), dtype)
    if base is None:
        return None
    low_split = next((u for u in base.users if u.target is split.target and u.args[1:] == split.args[1:]), None)
    if low_split is None or not low_split < item:
        low_split = insert_view(split, base)
    return insert_view(item, low_split)


def _widened(node: fx.Node) -> fx.Node | None:
    """The low node that ``node`` widens, where both are laid out alike (a cast of a slice is dense, a slice is not)."""
    source = source_of_widening(node)
    return source if source is not None and _same_layout(source.meta["val"], node.meta["val"]) else None


def _would_alias(node: fx.Node, other: fx.Node) -> bool:
    """Whether ``other`` in place of ``node`` would make an output share memory with an input or another output."""
    while _is_part(other):
        other = _argument(other)
    return _is_returned(node) and (other.op != "call_function" or _is_returned(other))


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" or (_is_part(user) and _is_returned(user)) for user in node.users)


def _is_part(node: fx.Node) -> bool:
    return is_view(node) or is_partial_view(node) or is_tuple_view(node)


def fold_casts(gm: fx.GraphModule, policy: Policy) -> PassResult:
    """Take out the casts that change nothing: to the dtype a value has, or back from an exact widening.

    before:  wide = convert(low, f32); again = convert(wide, bf16)
    after:   every reader of `again` reads `low`

    Legal because widening is exact. Leaves alone: a narrowing followed by a widening (that is a rounding), every
    cast the user wrote except a widening that became a no-op, a cast that also lays its argument out anew, and a
    cast without which an output would alias an input or another output.
    """
    changes = []
    for node in gm.graph.nodes:
        if not is_cast(node):
            continue
        same = _without_cast(node)
        if same is None or not node.users or _would_alias(node, same):
            continue
        changes.append(Change(node.name, op_name(node), str(dtype_of(node))[6:], "", "no-op cast"))
        node.replace_all_uses_with(same)
    return PassResult("fold_casts", tuple(changes))


def _without_cast(node: fx.Node) -> fx.Node | None:
    source = _argument(node)
    if dtype_of(source) is dtype_of(node) and CAST in node.meta:
        return source
    low = _widened(source) if source.op == "call_function" else None
    return low if low is not None and dtype_of(low) is dtype_of(node) else None
