"""Cast a weight anew in backward, or keep the low copy that forward made of it: by the cost model.

The fp32 parameter is in memory anyway, so that recasting holds nothing.
"""

from __future__ import annotations

from torch import fx

from mpcompile.passes.cost_model import Weights, rows_to_recast
from mpcompile.passes.edit import recompute_in_backward
from mpcompile.passes.graph import CAST, is_view, parameter_name, tensor


def recast_weights(node: fx.Node, weights: Weights) -> None:
    """Keep the low copies of parameters that a product reads out of what is saved for backward, where that pays."""
    if not _pays(node, weights):
        return
    for operand in node.all_input_nodes:
        chain = [operand]
        while is_view(chain[-1]):
            chain.append(chain[-1].all_input_nodes[0])
        if CAST in chain[-1].meta and parameter_name(chain[-1].all_input_nodes[0]):
            for link in chain:
                recompute_in_backward(link)


def _pays(node: fx.Node, weights: Weights) -> bool:
    result = tensor(node)
    # A convolution's weight is laid out anew in forward, so saving the parameter would save a copy in fp32.
    if result is None or result.dim() != 2:
        return False
    rows = result.shape[0]
    return not isinstance(rows, int) or rows >= rows_to_recast(result.device.type, weights)
