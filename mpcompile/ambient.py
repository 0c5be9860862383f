"""The ``autocast`` a graph is traced under: by default none, whatever is active around the compiled model.

An ambient context is not asked: mixprec decides, and dtypes stay as Dynamo traced them. The preset ``"torch"`` traces
under autocast on purpose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from mpcompile.passes.graph import LOW_DTYPES
from mpcompile.passes.policy import Policy
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
    asked: tuple[str, torch.dtype] | None
    """Device type and dtype of the autocast that the preset ``"torch"`` asks for."""

    @classmethod
    def around(cls, graph: fx.GraphModule, policy: Policy, device: torch.device) -> Autocast:
        """Look at the ambient autocast; make the outputs of ``graph`` come out in the dtypes it was captured with."""
        on = bool(enabled_autocasts())
        needed = on and _speaks_of_low_dtypes(graph)
        asked = (device.type, policy.dtype) if policy.preset == "torch" and not policy.is_fp32 else None
        if asked or (on and not needed):
            _restore_output_dtypes(graph)
        return cls(on, needed, asked)

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace the graph in this context; backward follows the dtypes of forward, as autograd has it."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracing_without_autocast(forward=not self.needed))
            if self.asked:
                stack.enter_context(torch.autocast(self.asked[0], self.asked[1]))
            yield

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
    """Cast outputs to the dtypes Dynamo saw, with an autocast that is gone or without the one to come."""
    (output,) = graph.graph.find_nodes(op="output")

    def restored(node: fx.Node) -> fx.Node:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, *LOW_DTYPES):
            return node
        with graph.graph.inserting_before(output):
            cast = graph.graph.call_method("to", (node, value.dtype))
        cast.meta["example_value"] = value
        return cast

    output.args = fx.node.map_arg(output.args, restored)
