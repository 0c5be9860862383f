"""An ``autocast`` context that is active around a compiled model: mixprec decides instead, dtypes stay as traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.passes.graph import LOW_DTYPES
from mpcompile.torch_compat import (
    enabled_autocasts,
    running_without_autocast,
    tracing_without_autocast,
)


@dataclass(frozen=True, slots=True)
class Autocast:
    """What to do about the autocast that was on while Dynamo captured the graph."""

    on: bool
    """Whether any was."""
    needed: bool
    """Whether the graph speaks of 16-bit types itself (``x.to(y.dtype)`` under autocast), and so needs autocast's own
    dtypes to be consistent; it is then traced with autocast on, as Dynamo did."""

    @classmethod
    def around(cls, graph: fx.GraphModule) -> Autocast:
        """Look at the ambient autocast; make the outputs of ``graph`` come out in the dtypes it was captured with."""
        on = bool(enabled_autocasts())
        needed = on and _speaks_of_low_dtypes(graph)
        if on and not needed:
            _restore_output_dtypes(graph)
        return cls(on, needed)

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """The context to trace the graph in."""
        return tracing_without_autocast(forward=not self.needed)

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the ambient autocast away from the kernels that the compiled code calls."""
        if not self.on or self.needed:
            return compiled

        def call(*args: Any) -> Any:
            with running_without_autocast():
                return compiled(*args)

        return call


def _speaks_of_low_dtypes(graph: fx.GraphModule) -> bool:
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES:
                return True
        elif any(isinstance(arg, torch.dtype) and arg in LOW_DTYPES for arg in tree_leaves((node.args, node.kwargs))):
            return True
    return False


def _restore_output_dtypes(graph: fx.GraphModule) -> None:
    """Cast the outputs that autocast made 16-bit: code after the graph was captured with them so."""
    (output,) = graph.graph.find_nodes(op="output")

    def restored(node: fx.Node) -> fx.Node:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or value.dtype not in LOW_DTYPES:
            return node
        with graph.graph.inserting_before(output):
            cast = graph.graph.call_method("to", (node, value.dtype))
        cast.meta["example_value"] = value
        return cast

    output.args = fx.node.map_arg(output.args, restored)
