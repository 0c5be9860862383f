"""Let all readers of a value read its low copy, where it has one.

A narrowed value is then stored once, low, instead of twice: half the bytes written, read and saved for backward.
This is what makes residual convolutional nets fast.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile.passes.compute_plan import plan_compute
from mpcompile.passes.edit import insert_cast
from mpcompile.passes.graph import (
    CAST,
    LOW_DTYPES,
    aten,
    dtype_of,
    is_cast,
    is_getitem,
    is_partial_view,
    is_view,
    packet_name,
    source_of_widening,
    tensor,
)
from mpcompile.passes.op_classes import RANKING_OPS, STATISTICS
from mpcompile.passes.policy import Policy
from mpcompile.passes.result import Change, PassResult


def share_low_copies(gm: fx.GraphModule, policy: Policy) -> PassResult:
    """Make readers of a value that exists in the low type read that copy, widened.

    before:  low = convert(x, bf16); y = add(x, r)
    after:   low = convert(x, bf16); wide = convert(low, f32); y = add(wide, r)

    Legal under the storage plan: one rounding of x, the one its low readers see anyway. Leaves alone: outputs,
    sums and statistics, comparisons and rankings, and operations that the plan keeps in fp32 (a router, an island),
    which keep reading the unrounded x, also through views;
    residual and gradient accumulations, where a rounding in every layer adds up (gradient error 1.15x in a post-norm
    transformer), except in convolutional nets, whose time is the bytes of their activations; inputs and parameters,
    which are in memory in fp32 whatever happens; and values that came from a widening.
    """
    changes = []
    kept = {node for node, decision in plan_compute(gm, policy).items() if decision.precision == "fp32"}
    for low in list(gm.graph.nodes):
        if CAST not in low.meta or dtype_of(low) not in LOW_DTYPES:
            continue
        value = low.args[0]
        assert isinstance(value, fx.Node)
        if value.op != "call_function" or source_of_widening(value) is not None:
            continue
        keep = _reads_unrounded if _feeds_convolution(low) else _reads_unrounded_or_accumulates
        readers = [user for user in value.users if user is not low and not keep(user, kept)]
        if not readers:
            continue
        wide = insert_cast(low, torch.float32)
        for reader in readers:
            reader.replace_input_with(value, wide)
        changes.append(
            Change(
                wide.name,
                str(wide.target),
                "float32",
                str(policy.dtype)[6:],
                f"{len(readers)} more readers of {value.name} read its low copy",
            )
        )
    return PassResult("share_low_copies", tuple(changes))


def _feeds_convolution(low: fx.Node) -> bool:
    return any(
        "convolution" in packet_name(user.target) or (is_view(user) and _feeds_convolution(user)) for user in low.users
    )


def _reads_unrounded_or_accumulates(reader: fx.Node, kept: set[fx.Node]) -> bool:
    if is_view(reader) or is_partial_view(reader) or is_getitem(reader):
        accumulates = any(_reads_unrounded_or_accumulates(user, kept) for user in reader.users)
        return accumulates or _reads_unrounded(reader, kept)
    return _accumulates(reader) or _reads_unrounded(reader, kept)


def _accumulates(reader: fx.Node) -> bool:
    """Whether a reader adds two computed values of one shape: a residual stream, a sum of gradients."""
    if reader.target is not aten.add.Tensor:
        return False
    first, second = (tensor(arg) for arg in reader.args[:2])
    return first is not None and second is not None and first.shape == second.shape


def _reads_unrounded(reader: fx.Node, kept: set[fx.Node]) -> bool:
    """Whether a reader must see the value before rounding, itself or through views of it."""
    if reader.op != "call_function" or is_cast(reader):
        return True
    if is_view(reader) or is_partial_view(reader) or is_getitem(reader):
        return any(_reads_unrounded(user, kept) for user in reader.users)
    name = packet_name(reader.target)
    return name in RANKING_OPS or name in STATISTICS or reader in kept
