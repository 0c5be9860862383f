"""Take the bias gradient out of a convolution's backward, so that it stays a sum in fp32."""

from __future__ import annotations

from torch import fx

from mpcompile.passes.edit import insert_after, refresh
from mpcompile.passes.graph import aten, is_getitem, tensor

_BIAS = 2
_MASK = 10


def keep_bias_gradient(node: fx.Node) -> None:
    """Compute the bias gradient of a ``convolution_backward`` as a sum of the unrounded output gradient.

    before:  conv = convolution_backward(g, x, w, ..., [True, True, True]);  db = conv[2]
    after:   conv = convolution_backward(g, x, w, ..., [True, True, False]); db = sum(g, (0, 2, 3))

    Legal because that sum is the definition of the bias gradient. Leaves alone every other node, and a backward
    that computes nothing but the bias gradient.
    """
    if node.target is not aten.convolution_backward.default:
        return
    mask = list(node.args[_MASK])  # type: ignore[arg-type]
    gradient = node.args[0]
    value = tensor(gradient)
    if not mask[_BIAS] or not any(mask[:_BIAS]) or value is None:
        return
    assert isinstance(gradient, fx.Node)
    dims = [dim for dim in range(value.dim()) if dim != 1]
    for item in [user for user in node.users if is_getitem(user) and user.args[1] == _BIAS]:
        bias = insert_after(item, aten.sum.dim_IntList, (gradient, dims), {}, item)
        item.replace_all_uses_with(bias)
        node.graph.erase_node(item)
    node.args = (*node.args[:_MASK], [*mask[:_BIAS], False], *node.args[_MASK + 1 :])
    refresh(node)
