"""Cast a weight anew in backward, or keep the low copy that forward made of it: by the cost model.

The fp32 parameter is in memory anyway, so that recasting holds nothing.
"""

from __future__ import annotations

from torch import fx

from mpcompile.passes.cost_model import Weights, rows_to_recast
from mpcompile.passes.edit import recompute_in_backward, save_for_backward
from mpcompile.passes.graph import CAST, is_view, packet_name, parameter_name, tensor


def recast_weights(node: fx.Node, weights: Weights) -> None:
    """Keep the low copies of parameters that a product reads out of what is saved for backward, where that pays.

    A convolution's weight is laid out anew in forward, so that saving the parameter would save a copy of it in fp32:
    there the low copy is saved.
    """
    chains = [chain for operand in node.all_input_nodes if (chain := _copy_of_parameter(operand))]
    if "convolution" in packet_name(node.target):
        for chain in chains:
            save_for_backward(chain[-1])
    elif _pays(node, weights):
        for chain in chains:
            for link in chain:
                recompute_in_backward(link)


def _copy_of_parameter(operand: fx.Node) -> list[fx.Node]:
    """The views from an operand down to the low copy of a parameter, and the copy; none where it is no such copy."""
    chain = [operand]
    while is_view(chain[-1]):
        chain.append(chain[-1].all_input_nodes[0])
    is_copy = CAST in chain[-1].meta and bool(parameter_name(chain[-1].all_input_nodes[0]))
    return chain if is_copy else []


def _pays(node: fx.Node, weights: Weights) -> bool:
    result = tensor(node)
    if result is None or result.dim() != 2:
        return False
    rows = result.shape[0]
    return not isinstance(rows, int) or rows >= rows_to_recast(result.device.type, weights)
