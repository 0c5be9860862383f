"""Building nodes of an ATen graph.

A new node always carries a true ``meta["val"]``, computed by running the op on the fake values (never built by hand:
the strides of a hand-made one are wrong for non-dense inputs), and the provenance of the node it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy

from mpcompile.passes.graph import CAST, DECOMPOSED, arguments, aten, is_backward, prims, tensor

# Keys that say where a node comes from; a node made on behalf of another inherits them.
_PROVENANCE = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
    "fwd_source_fn_stack",
    "original_aten",
    "from_node",
    "seq_nr",
    "custom",
    "partitioner_tag",
    "autograd_backward",
    "recompute",
    "ac_graph_id",
)


def replace_arguments(node: fx.Node, replace: Callable[[str, Any], Any]) -> None:
    """Set every argument of an operator call to ``replace(name, value)``."""
    named = list(arguments(node))
    count = len(node.args)
    node.args = tuple(replace(name, value) for name, value in named[:count])
    node.kwargs = {name: replace(name, value) for name, value in named[count:]}


def run_fake(node: fx.Node) -> Any:
    """Run a node's op on the fake values of its arguments: shape, dtype and strides as at run time."""
    fake_mode = _fake_mode(node)
    args, kwargs = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
    assert callable(node.target)
    if fake_mode is None:
        return node.target(*args, **kwargs)
    with fake_mode:
        return node.target(*args, **kwargs)


def _fake_mode(node: fx.Node) -> Any:
    for source in node.all_input_nodes:
        mode = getattr(tensor(source), "fake_mode", None)
        if mode is not None:
            return mode
    return None


def refresh(node: fx.Node) -> None:
    """Recompute ``meta["val"]`` after a node's arguments changed, and drop what was recorded of the old ones."""
    node.meta["val"] = run_fake(node)
    node.meta.pop("tensor_meta", None)
    # Inductor keeps some ops' input strides as they were in eager mode; those were of the old inputs.
    node.meta.pop("eager_input_vals", None)


def insert_after(
    anchor: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node, name: str | None = None
) -> fx.Node:
    """Insert a call right after ``anchor``, with the provenance of ``like`` and a fresh ``meta["val"]``."""
    graph = anchor.graph
    with graph.inserting_before(_first_call(anchor) if anchor.op == "placeholder" else anchor.next):
        node = graph.create_node("call_function", target, args, kwargs, name)
    node.meta = {key: like.meta[key] for key in _PROVENANCE if key in like.meta}
    refresh(node)
    return node


def _first_call(source: fx.Node) -> fx.Node:
    """The first call after the inputs; where ``source`` is a tangent, the first of backward (or that reads it)."""
    node = source
    while node.op == "placeholder" or (is_backward(source) and not _begins_backward(node, source)):
        node = node.next
    return node


def _begins_backward(node: fx.Node, tangent: fx.Node) -> bool:
    return node.op == "output" or is_backward(node) or tangent in node.all_input_nodes


def insert_cast(source: fx.Node, dtype: torch.dtype, like: fx.Node | None = None) -> fx.Node:
    """Insert a cast of ``source`` right after it; ``like`` gives its provenance where source has none."""
    if _is_decomposed(source.graph):
        node = insert_after(source, prims.convert_element_type.default, (source, dtype), {}, like or source)
    else:  # prims have no derivative, and an exported graph may still be trained
        node = insert_after(source, aten._to_copy.default, (source,), {"dtype": dtype}, like or source)
    node.meta[CAST] = True
    return node


def _is_decomposed(graph: fx.Graph) -> bool:
    owner = graph.owning_module
    return owner is not None and DECOMPOSED in owner.meta


def insert_view(view: fx.Node, base: fx.Node) -> fx.Node:
    """Insert the same view as ``view``, of ``base`` instead of its own first argument."""
    return insert_after(view, view.target, (base, *view.args[1:]), dict(view.kwargs), view)


def recompute_in_backward(node: fx.Node) -> None:
    """Tell the partitioner to compute a node again in backward instead of saving its value."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def save_for_backward(node: fx.Node) -> None:
    """Tell the partitioner to save a value that backward needs, and not to compute it again."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
