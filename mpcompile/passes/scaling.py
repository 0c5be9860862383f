"""Loss scaling inside the joint graph: S on what enters backward, 1/S and a flag on what leaves it.

Outside the graph every gradient is the true one, so that clipping, accumulation and hooks need to know nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.passes.edit import insert_after, insert_cast, insert_view
from mpcompile.passes.graph import (
    LOW_DTYPES,
    aten,
    describe,
    dtype_of,
    is_cast,
    is_getitem,
    is_partial_view,
    is_view,
    op_name,
    output_of,
    prims,
    tensor,
)
from mpcompile.passes.linearity import carries_factor, unscaled_summands
from mpcompile.passes.policy import Policy
from mpcompile.passes.result import Change, PassError, PassResult

SCALING = "mixprec_scaling"
"""Key of ``gm.meta`` of a joint graph that is to be scaled: its ``ScalingSite``."""


@dataclass(frozen=True, slots=True)
class ScalingSite:
    """Where loss scaling attaches to a joint graph: node names and output positions, found by whoever made it."""

    scale: str
    """The input that holds S: fp32, no dimensions, a power of two."""
    tangents: tuple[str, ...]
    """The inputs that are gradients of outputs."""
    gradients: Mapping[int, int]
    """Position of every output that is a gradient of an input, and the slot of its flag."""
    flags: int
    """Position of the output that takes the flags, nothing before: fp32 [slots], 1 where a gradient is not finite."""
    names: tuple[str, ...]
    """For every slot the name of the input, for people."""


def insert_loss_scaling(gm: fx.GraphModule, policy: Policy) -> PassResult:
    """Multiply every tangent by S and every gradient by 1/S, both in fp32, and flag the gradients that overflowed.

    before:  backward(tangents_1: f32) -> grad: f32
    after:   scaled_tangents_1 = tangents_1 * scale;  backward(scaled_tangents_1);  unscaled_grad = grad * (1 / scale)
             gradient_flags = cat([any(not |unscaled_grad| < inf), ...])

    Legal because backward is linear in its tangents and S is a power of two: nothing is rounded. Where an operation
    of backward is not linear (a custom backward that clips, compares or adds a constant), its operands are unscaled
    before it and its result is scaled after it. Leaves alone: graphs without a ``ScalingSite``, and gradients that no
    tangent reaches. Raises ``PassError`` where a scaled value would leave the graph.
    """
    site = gm.meta.get(SCALING)
    if site is None or _output_args(gm)[site.flags] is not None:
        return PassResult("insert_loss_scaling", ())
    scaling = _Scaling(gm, site)
    scaling.scale_tangents()
    scaling.follow()
    scaling.unscale_gradients()
    scaling.write_flags()
    scaling.require_unscaled_outputs()
    return PassResult("insert_loss_scaling", tuple(scaling.changes))


def _output_args(gm: fx.GraphModule) -> list[Any]:
    (values,) = output_of(gm).args
    assert isinstance(values, (list, tuple))
    return list(values)


class _Scaling:
    """One graph being scaled: which of its values carry the factor S."""

    def __init__(self, gm: fx.GraphModule, site: ScalingSite) -> None:
        self._gm = gm
        self._site = site
        named = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
        self._scale = named[site.scale]
        self._tangents = [named[name] for name in site.tangents if tensor(named[name]) is not None]
        if not self._tangents or not site.gradients:
            raise PassError(
                f"Loss scaling found {len(self._tangents)} tangents and {len(site.gradients)} gradients in a graph "
                "that is trained: scaled tangents and unscaled gradients would not match."
            )
        self._scaled: set[fx.Node] = set()
        self._true: dict[fx.Node, fx.Node] = {}
        self.changes: list[Change] = []

    def scale_tangents(self) -> None:
        """Multiply what enters backward by S."""
        for tangent in self._tangents:
            readers = list(tangent.users)
            scaled = self._times(tangent, self._scale, f"scaled_{tangent.name}", "scaled where backward begins")
            for reader in readers:
                reader.replace_input_with(tangent, scaled)
            self._scaled.add(scaled)
        # After them: it is put where backward begins, before what is there already.
        like = self._tangents[0]
        self._inverse = insert_after(like, aten.reciprocal.default, (self._scale,), {}, like, "inverse_scale")

    def follow(self) -> None:
        """Follow the factor through backward; give operations that do not carry it true values."""
        for node in list(self._gm.graph.nodes):
            sources = [source for source in node.all_input_nodes if source in self._scaled]
            if node.op != "call_function" or not sources or node in self._scaled:
                continue
            for summand in unscaled_summands(node, self._scaled):
                scaled = self._times(summand, self._scale, f"scaled_{summand.name}", "added to scaled gradients")
                node.replace_input_with(summand, scaled)
                self._scaled.add(scaled)
            if carries_factor(node, self._scaled):
                self._scaled.add(node)
            else:
                self._compute_unscaled(node, sources)

    def _compute_unscaled(self, node: fx.Node, sources: list[fx.Node]) -> None:
        for source in sources:
            node.replace_input_with(source, self._unscaled(source, f"true_{source.name}", f"read by {op_name(node)}"))
        results = [node] if tensor(node) is not None else [user for user in node.users if is_getitem(user)]
        for result in results:
            dtype = dtype_of(result)
            if dtype is None or not (dtype.is_floating_point or dtype.is_complex) or not result.users:
                continue
            readers = list(result.users)
            scaled = self._times(result, self._scale, f"scaled_{result.name}", "scaled again")
            for reader in readers:
                reader.replace_input_with(result, scaled)
            self._scaled.add(scaled)

    def unscale_gradients(self) -> None:
        """Multiply what leaves backward by 1/S."""
        outputs = _output_args(self._gm)
        for position, slot in self._site.gradients.items():
            gradient = outputs[position]
            if gradient in self._scaled:
                name = f"unscaled_{self._site.names[slot] or gradient.name}"
                outputs[position] = self._unscaled(gradient, name, "unscaled where it ends")
        output_of(self._gm).args = (outputs,)

    def write_flags(self) -> None:
        """Write one flag for every slot: whether a gradient of it is infinite or not a number."""
        outputs = _output_args(self._gm)
        flags: list[list[fx.Node]] = [[] for _ in self._site.names]
        for position, slot in self._site.gradients.items():
            if isinstance(outputs[position], fx.Node):
                flags[slot].append(self._flag(outputs[position]))
        last = max((flag for group in flags for flag in group), default=self._inverse)
        last, never = self._append(last, aten.lt.Scalar, (self._scale, 0.0))
        combined = []
        for group in flags:
            flag = group[0] if group else never
            for other in group[1:]:
                last, flag = self._append(last, aten.logical_or.default, (flag, other))
            last, flag = self._append(last, aten.unsqueeze.default, (flag, 0))
            combined.append(flag)
        last, flag = self._append(last, aten.cat.default, (combined,))
        _, written = self._append(last, prims.convert_element_type.default, (flag, torch.float32), "gradient_flags")
        outputs[self._site.flags] = written
        output_of(self._gm).args = (outputs,)
        self.changes.append(Change(written.name, op_name(written), "", "float32", "vector of overflow flags"))

    def _flag(self, gradient: fx.Node) -> fx.Node:
        # Not isfinite: that is decomposed, and what a pass inserts no longer is.
        last, size = self._append(gradient, aten.abs.default, (gradient,))
        last, finite = self._append(last, aten.lt.Scalar, (size, float("inf")))
        last, bad = self._append(last, aten.logical_not.default, (finite,))
        return self._append(last, aten.any.default, (bad,))[1]

    def _append(self, anchor: fx.Node, target: Any, args: Any, name: str | None = None) -> tuple[fx.Node, fx.Node]:
        node = insert_after(anchor, target, args, {}, self._tangents[0], name)
        return node, node

    def _times(self, value: fx.Node, factor: fx.Node, name: str, reason: str) -> fx.Node:
        """``value * factor`` in at least fp32, in the dtype of ``value``."""
        if (device := _device(value)) != _device(factor):
            raise PassError(
                f"{describe(value)} is on {device}, the loss scale on {_device(factor)}: one compiled graph cannot be "
                "scaled over several devices. Break the graph between them, or use dtype='bf16'."
            )
        dtype = dtype_of(value)
        assert dtype is not None
        wide = insert_cast(value, torch.float32) if dtype in LOW_DTYPES else value
        product = insert_after(wide, aten.mul.Tensor, (wide, factor), {}, value, name)
        if product.meta["val"].dtype is not dtype:
            product = insert_cast(product, dtype)
        self.changes.append(Change(product.name, op_name(product), str(dtype)[6:], str(dtype)[6:], reason))
        return product

    def _unscaled(self, node: fx.Node, name: str, reason: str) -> fx.Node:
        """The true value of a scaled one: made above its views, which keep their strides."""
        if node not in self._true:
            source = node.args[0] if node.args else None
            if _is_view_of_one(node) and source in self._scaled:
                assert isinstance(source, fx.Node)
                self._true[node] = insert_view(node, self._unscaled(source, name, reason))
            elif is_partial_view(node) and source in self._scaled:  # a piece of a split
                assert isinstance(source, fx.Node)
                whole = source.args[0]
                assert isinstance(whole, fx.Node)
                self._true[node] = insert_view(node, insert_view(source, self._unscaled(whole, name, reason)))
            elif is_cast(node) and dtype_of(node) in LOW_DTYPES and source in self._scaled:
                assert isinstance(source, fx.Node)
                dtype = dtype_of(node)
                assert dtype is not None
                self._true[node] = insert_cast(self._unscaled(source, name, reason), dtype)
            else:
                self._true[node] = self._times(node, self._inverse, name, reason)
        return self._true[node]

    def require_unscaled_outputs(self) -> None:
        """Raise where a value that carries S leaves the graph."""
        for value in tree_leaves(_output_args(self._gm)):
            if value in self._scaled:
                raise PassError(f"The scaled value {describe(value)} would leave the graph where no gradient does.")


def _is_view_of_one(node: fx.Node) -> bool:
    """Whether a node is a view of its first argument: a gradient that is one must stay one to keep its strides."""
    return is_view(node) or (is_partial_view(node) and not is_getitem(node))


def _device(node: fx.Node) -> torch.device | None:
    value = tensor(node)
    return None if value is None else value.device
