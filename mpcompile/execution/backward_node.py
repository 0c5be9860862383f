"""Find the one autograd node that computes the gradients of a compiled function, to hook it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def backward_nodes(outputs: Iterable[Any]) -> set[Any]:
    """The nodes of compiled functions behind ``outputs``: its own, and those of inputs it returns views of."""
    return {
        node
        for output in outputs
        if isinstance(output, torch.Tensor) and (node := _compiled_node(output.grad_fn)) is not None
    }


def number_of_backward() -> int:
    """The number of the backward that is running in this thread; later ones have higher numbers."""
    # Relies on: the engine numbers its graph tasks by a counter.
    return int(torch._C._current_graph_task_id())


def accumulates(leaf: torch.Tensor) -> bool:
    """Whether the backward that is running accumulates into ``.grad``, of ``leaf`` and others."""
    try:
        # Relies on: within a backward the engine says of a leaf whether it will accumulate, and raises for
        # ``torch.autograd.grad``, which never does.
        torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError:
        return False
    return True


def _compiled_node(node: Any) -> Any:
    """The compiled function's own node, below the views that alias its outputs."""
    # torch names the node after AOTAutograd's class CompiledFunction, one class for each compiled graph.
    while node is not None and "CompiledFunction" not in node.name():
        node = node.next_functions[-1][0] if node.next_functions else None  # of a copy into an input: the source
    return node
