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


def _compiled_node(node: Any) -> Any:
    """The compiled function's own node, below the views that alias its outputs."""
    # torch names the node after AOTAutograd's class CompiledFunction, one class for each compiled graph.
    while node is not None and "CompiledFunction" not in node.name():
        node = node.next_functions[0][0] if node.next_functions else None
    return node
