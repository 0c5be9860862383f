"""Carry out the storage plan: let the readers of a value read its low form.

A value is then stored once, low, instead of twice or in fp32: half the bytes written, read and saved for backward.
"""

from __future__ import annotations

import torch
from torch import fx

from mpcompile.passes.cost_model import Value
from mpcompile.passes.edit import insert_cast
from mpcompile.passes.graph import CAST, op_name, source_of_widening
from mpcompile.passes.policy import Policy
from mpcompile.passes.readers import low_form
from mpcompile.passes.result import Change, PassResult
from mpcompile.passes.storage_plan import STORED, plan_storage


def store_low(gm: fx.GraphModule, policy: Policy) -> PassResult:
    """Round a value once, after its producer, for all readers that the plan gives the low form.

    before:  y = add(x, r); z = mul(x, g)              # x in fp32; mul is backward's
    after:   low = convert(x, bf16); wide = convert(low, f32)
             y = add(wide, r); z = mul(wide, g)        # x stored low
             y = add(x, r);    z = mul(wide, g)        # x saved low

    Legal because the plan leaves alone what must not be rounded: outputs, sums and statistics, comparisons and
    rankings, operations kept in fp32, inputs and parameters.
    """
    changes = []
    for value, how in plan_storage(gm, policy).items():
        readers = (*value.sooner, *value.later) if how == STORED else value.later
        wide = _rounded(value, policy.dtype)
        for reader in readers:
            reader.replace_input_with(value.node, wide)
        more = "1 more reader reads" if len(readers) == 1 else f"{len(readers)} more readers read"
        reason = f"{value.node.name} is {how} low: {more} that form"
        changes.append(Change(wide.name, op_name(wide), "float32", str(policy.dtype)[6:], reason))
    return PassResult("store_low", tuple(changes))


def _rounded(value: Value, low: torch.dtype) -> fx.Node:
    narrow = low_form(value.node) or insert_cast(value.node, low)
    widened = (user for user in narrow.users if CAST in user.meta and source_of_widening(user))
    return next(widened, None) or insert_cast(narrow, torch.float32)
