"""Where kernels end: what a code generator fuses into one kernel, and what it must write to memory in between.

An estimate, the same for every code generator: elementwise operations, views and reductions fuse with their neighbours;
matmuls, convolutions, attention, sorts, scatters and operators it does not know are kernels of their own.
"""

from __future__ import annotations

from torch import fx

from mpcompile.passes.graph import is_getitem, packet_name
from mpcompile.passes.op_classes import FP32_OPS, OpClass, classify

_WHOLE_GROUPS = ("fft or factorisation", "accumulating scatter", "coordinates")
_WHOLE = frozenset(
    """sort argsort topk kthvalue mode median masked_select masked_scatter scatter unfold searchsorted bucketize
max_pool2d_with_indices""".split()
)
"""Operations that read and write memory though they are no products."""


def fuses(node: fx.Node) -> bool:
    """Whether a node can share a kernel with its neighbours."""
    if node.op != "call_function":
        return False
    if is_getitem(node):
        source = node.args[0]
        return isinstance(source, fx.Node) and fuses(source)
    name = packet_name(node.target)
    if name in _WHOLE or FP32_OPS.get(name) in _WHOLE_GROUPS:
        return False
    return classify(node.target) not in (OpClass.LOW, OpClass.OPAQUE)


def stages(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many kernels at least have to end before each node can run.

    A value whose reader is of a later stage crosses memory. (Of one stage, kernels may still be several.)
    """
    stage: dict[fx.Node, int] = {}
    fused: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        fused[node] = fuses(node)
        before = (
            stage[source] + (not (fused[source] and fused[node]))
            for source in node.all_input_nodes
            if source.op == "call_function"
        )
        stage[node] = max(before, default=0)
    return stage
