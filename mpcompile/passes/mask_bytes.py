"""Save the masks of forward as bytes of another type, on a CPU, where generated kernels store Booleans one by one.

Inductor's vectorised kernels (2.11 to 2.14) keep a comparison as lanes of floats. To store it as Booleans they go
through every lane; stored as 8-bit integers it is converted, and costs a tenth.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile.passes.edit import insert_after, recompute_in_backward, save_for_backward
from mpcompile.passes.fusion import fuses
from mpcompile.passes.graph import aten, is_backward, op_name, prims, tensor
from mpcompile.passes.policy import Policy
from mpcompile.passes.readers import is_moved, readers_below
from mpcompile.passes.result import Change, PassResult
from mpcompile.passes.saved_values import predict_partition


def save_masks_as_bytes(gm: fx.GraphModule, policy: Policy) -> PassResult:
    """Let backward read a mask that forward saves for it, such as a dropout's, from 8-bit integers.

    before:  mask = gt(random, p); y = where(mask, x, 0); gx = where(mask, gy, 0)
    after:   byte = convert(convert(mask, f32), uint8)     # saved
             again = ne(convert(byte, f32), 0)
             y = where(mask, x, 0); gx = where(again, gy, 0)

    Legal because 0 and 1 are exact in every type on the way; a byte is a byte, so that nothing more is saved. Leaves
    alone: other devices, masks that backward computes anew, and masks that are in memory as Booleans all the same.
    """
    masks = [node for node in gm.graph.nodes if _is_mask(node)]
    partition = predict_partition(gm.graph) if masks else None
    changes = []
    for mask in masks:
        if partition is not None and mask in partition.saved:
            # What backward computes anew reads the saved form too, or the mask would be saved as it is for that.
            readers = [user for user in mask.users if user in partition.recomputed or user not in partition.forward]
            again = _through_bytes(mask)
            for reader in readers:
                reader.replace_input_with(mask, again)
            reason = f"{mask.name} is saved as 8-bit integers, which a kernel stores at once"
            changes.append(Change(again.name, op_name(again), "", "bool", reason))
    return PassResult("save_masks_as_bytes", tuple(changes))


def _is_mask(node: fx.Node) -> bool:
    value = tensor(node)
    if value is None or value.dtype is not torch.bool or value.device.type != "cpu" or not fuses(node):
        return False
    return not is_moved(node) and all(fuses(below) for user in node.users for below in readers_below(user))


def _through_bytes(mask: fx.Node) -> fx.Node:
    convert = prims.convert_element_type.default
    lanes = insert_after(mask, convert, (mask, torch.float32), {}, mask)
    byte = insert_after(lanes, convert, (lanes, torch.uint8), {}, mask)
    save_for_backward(byte)
    if is_backward(mask):  # as autograd recorded it, though it depends on no gradient and forward computes it
        for node in (lanes, byte):
            node.meta.pop("partitioner_tag", None)
            node.meta.pop("autograd_backward", None)
    read = insert_after(byte, convert, (byte, torch.float32), {}, mask)
    again = insert_after(read, aten.ne.Scalar, (read, 0), {}, mask)
    recompute_in_backward(read)
    recompute_in_backward(again)
    return again
