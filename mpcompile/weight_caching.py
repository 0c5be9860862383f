"""Give a captured graph the low copies of its weights as inputs, and the runtime that keeps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mpcompile.execution.cached_graph import Cached, CachedGraph
from mpcompile.graph_inputs import GraphInputs
from mpcompile.passes.matmul_weights import single_row_weights
from mpcompile.passes.policy import Policy
from mpcompile.passes.wide_products import rounds_no_product
from mpcompile.torch_compat import add_input


@dataclass(frozen=True, slots=True)
class WeightCaching:
    """The low copies of one graph that is being compiled."""

    copied: tuple[Cached, ...]
    strict: bool
    state: tuple[torch.Tensor, ...]
    """Examples of the copies, to compile with."""

    @classmethod
    def attach(
        cls, graph: fx.GraphModule, inputs: GraphInputs, policy: Policy, *, emulated: bool, strict: bool
    ) -> WeightCaching:
        """Give ``graph`` one input for each copy.

        ``emulated``: the device multiplies in fp32. Then the copies hold rounded values in fp32, and no call has to
        widen them; but for those that single rows are multiplied with, in the low type (see ``passes.emulation``),
        which no product is whose result is not rounded.
        """
        placeholders = graph.graph.find_nodes(op="placeholder")
        as_low = set() if torch.is_grad_enabled() or rounds_no_product(policy) else single_row_weights(graph)
        copied, state = [], []
        for position, low in inputs.copies.items():
            held = torch.float32 if emulated and placeholders[position] not in as_low else low
            value = placeholders[position].meta["example_value"]
            # Of the parameter's strides, and never read.
            example = torch.empty_strided(value.shape, value.stride(), dtype=held, device=value.device)
            copied.append(Cached(position, inputs.parameters[position], low, held))
            state.append(add_input(graph, f"low_copy_{position}", example, static=True))
        return cls(tuple(copied), strict, tuple(state))

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Call the compiled graph with the copies of the parameters it is called with."""
        if not self.state:
            return compiled
        return CachedGraph(compiled, self.copied, self.state, strict=self.strict)
