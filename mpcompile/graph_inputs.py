"""What is known of the inputs of Dynamo's graph, and where they are in the joint graph that autograd makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from mpcompile.execution.cached_graph import may_be_cached
from mpcompile.passes.gradient_role import WEIGHT_GRADIENTS
from mpcompile.passes.graph import LOW_COPY, LOW_DTYPES, PARAMETER, output_of, subgraphs, tensor
from mpcompile.passes.matmul_weights import matmul_weights
from mpcompile.passes.range_guard import BEYOND_RANGE, LARGEST
from mpcompile.passes.scaling import SCALING, ScalingSite
from mpcompile.passes.wide_gradients import WIDE_GRADIENTS


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """The inputs of Dynamo's graph, by position."""

    parameters: Mapping[int, str]
    """The names of those that are parameters."""
    weights: frozenset[int]
    """Those whose gradients are weight gradients: the parameters, or the leaves of a function that has none."""
    beyond_range: frozenset[int]
    """Parameters with values that fp16 cannot hold."""
    wide_gradients: frozenset[int]
    """16-bit leaves: autograd casts a wide gradient to the dtype it is accumulated in, which may be fp32."""
    slots: Mapping[int, str]
    """Where gradients are scaled: every differentiable input, with its name, in the order of their overflow flags. Then
    the graph has two inputs more, the loss scale and the probe. Empty otherwise."""
    count: int
    """How many inputs the user's graph has. After them come the loss scale and the probe, where there are ``slots``,
    and then the ``copies``."""
    copies: Mapping[int, torch.dtype] = field(default_factory=dict)
    """With the weight cache: the parameters that the graph also gets in a low type, in the order of these inputs, and
    that type."""

    @classmethod
    def of(
        cls,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        names: Mapping[str, str],
        low: torch.dtype,
        scaled: bool,
        cached: bool = False,
    ) -> GraphInputs:
        """Look at the inputs of ``graph``; ``names``: parameter name of every placeholder that is one."""
        placeholders = graph.graph.find_nodes(op="placeholder")
        parameters = {i: names[node.name] for i, node in enumerate(placeholders) if node.name in names}
        differentiable = [i for i, value in enumerate(inputs) if _is_differentiable(value)] if scaled else []
        beyond = frozenset(i for i in parameters if low is torch.float16 and _is_beyond_range(inputs[i]))
        read = set(matmul_weights(graph)) if cached else set()
        copied = [i for i in parameters if placeholders[i] in read and i not in beyond and _is_weight(inputs[i])]
        return cls(
            parameters=parameters,
            weights=frozenset(parameters or (i for i, value in enumerate(inputs) if _is_leaf(value))),
            beyond_range=beyond,
            wide_gradients=frozenset(i for i, value in enumerate(inputs) if _is_low_leaf(value)),
            slots={i: parameters.get(i, placeholders[i].name) for i in differentiable},
            count=len(inputs),
            copies=dict.fromkeys(copied, low),
        )

    def key(self) -> tuple[str, ...]:
        """What of this decides about the rewritten graph, for the compile cache key."""
        return (
            *(f"{position}: {name}" for position, name in self.parameters.items()),
            f"beyond range {sorted(self.beyond_range)}",
            f"wide {sorted(self.wide_gradients)}",
            f"weights {sorted(self.weights)}",
            f"scaled {list(self.slots)}",
            f"copies {self.copies}",
        )

    def mark_range(self, graph: fx.GraphModule) -> None:
        """Write down in Dynamo's graph which inputs fp16 cannot hold."""
        for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            if position in self.beyond_range:
                node.meta[BEYOND_RANGE] = True

    def mark(self, gm: fx.GraphModule) -> None:
        """Write down in a joint (or inference) graph which of its inputs and outputs are which."""
        for node in gm.graph.find_nodes(op="placeholder"):
            position = _position(node.meta.get("desc"))
            if position is not None and position in self.parameters:
                node.meta[PARAMETER] = self.parameters[position]
            if position in self.beyond_range:
                node.meta[BEYOND_RANGE] = True
        self._mark_copies(gm)
        _mark_bodies(gm)
        gradients = dict(gradient_outputs(gm))
        output_of(gm).meta[WEIGHT_GRADIENTS] = tuple(i for i, of in gradients.items() if of in self.weights)
        gm.meta[WIDE_GRADIENTS] = tuple(i for i, position in gradients.items() if position in self.wide_gradients)
        if self.slots and gradients:
            gm.meta[SCALING] = self._site(gm, gradients)

    def _mark_copies(self, gm: fx.GraphModule) -> None:
        if not self.copies:
            return
        placeholders = gm.graph.find_nodes(op="placeholder")
        nodes = {_position(node.meta.get("desc")): node for node in placeholders}
        first = self.count + (2 if self.slots else 0)
        for index, (position, low) in enumerate(self.copies.items(), first):
            nodes[position].meta[LOW_COPY] = (nodes[index].name, low)

    def _site(self, gm: fx.GraphModule, gradients: Mapping[int, int]) -> ScalingSite:
        placeholders = gm.graph.find_nodes(op="placeholder")
        tangents = [node for node in placeholders if _is_tangent(node)]
        (scale,) = [node for node in placeholders if _position(node.meta.get("desc")) == self.count]
        primals = [node for node in placeholders if not _is_tangent(node)]
        (probe,) = [i for i, node in enumerate(primals) if _position(node.meta.get("desc")) == self.count + 1]
        outputs = output_of(gm).args[0]
        assert isinstance(outputs, (list, tuple))
        slots = {position: slot for slot, position in enumerate(self.slots)}
        return ScalingSite(
            scale=scale.name,
            tangents=tuple(node.name for node in tangents),
            gradients={i: slots.get(position, 0) for i, position in gradients.items()},
            flags=len(outputs) - len(primals) + probe,
            names=tuple(self.slots.values()),
        )


def _mark_bodies(gm: fx.GraphModule) -> None:
    """Hand on to the bodies of higher-order ops what is known of their operands: the last arguments of the call."""
    for name, body in subgraphs(gm):
        inner = body.graph.find_nodes(op="placeholder")
        readers = [node for node in gm.graph.find_nodes(op="get_attr") if node.target == name]
        for call in [user for node in readers for user in node.users]:
            operands = [leaf for leaf in tree_leaves(call.args) if isinstance(leaf, fx.Node)][-len(inner) :]
            for placeholder, operand in zip(inner, operands, strict=False):
                known = {key: operand.meta[key] for key in (PARAMETER, BEYOND_RANGE) if key in operand.meta}
                placeholder.meta.update(known)
        _mark_bodies(body)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_beyond_range(value: Any) -> bool:
    if isinstance(value, FakeTensor) or not isinstance(value, torch.Tensor) or not value.numel():
        return False
    if value.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return False
    ends = torch.stack((value.detach().amin(), value.detach().amax())).abs()
    return bool(((ends > LARGEST) & torch.isfinite(ends)).any())


def _is_leaf(value: Any) -> bool:
    return _is_differentiable(value) and bool(value.is_leaf)


def _is_weight(value: Any) -> bool:
    return may_be_cached(value) and value.dim() >= 2


def _is_low_leaf(value: Any) -> bool:
    return _is_leaf(value) and value.dtype in LOW_DTYPES


# AOTAutograd describes every input and output of its graph in ``meta["desc"]``: ``PlainAOTInput(idx)``,
# ``TangentAOTInput``, ``GradAOTOutput(grad_of)``; the parts of a tensor subclass have the whole's as ``.base``,
# a base that autograd made of several views has one of them as ``.base_of``.


def _position(description: Any) -> int | None:
    """Position in Dynamo's graph of the input that is described; None for one of autograd's own."""
    description = _whole(description)
    # Tokens and dummies have an ``idx`` too, of their own.
    return description.idx if type(description).__name__ == "PlainAOTInput" else None


def _whole(description: Any) -> Any:
    while inner := getattr(description, "base", None) or getattr(description, "base_of", None):
        description = inner
    return description


def _is_tangent(node: fx.Node) -> bool:
    return bool(getattr(_whole(node.meta.get("desc")), "is_tangent", bool)())


def gradient_outputs(gm: fx.GraphModule) -> Iterator[tuple[int, int]]:
    """Every output that is a gradient, with the position in Dynamo's graph of the input it is the gradient of."""
    output = output_of(gm)
    values, descriptions = output.args[0], output.meta.get("desc", ())
    if not isinstance(values, (list, tuple)):
        return
    for index, (value, description) in enumerate(zip(values, descriptions, strict=False)):
        description = _whole(description)
        # A tensor subclass comes as its parts, some of which are no tensors.
        if tensor(value) is not None and getattr(description, "is_grad", bool)():
            yield index, -1 if (position := _position(description.grad_of)) is None else position
