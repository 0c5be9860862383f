"""The range of loss scales that the gradients of a model allow in fp16, from the values of its backward."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from mpcompile.analysis.compared import Compared
from mpcompile.passes.graph import dtype_of, is_backward

_LARGEST = 15
"""Binary exponent of fp16's largest numbers."""
_SMALLEST = -24
"""Of its smallest."""
LOST = 0.01
"""The share of gradient values that may round to zero."""


def exponents_of(each: Compared) -> Counter[int]:
    """How many values of backward that are held in fp16 have which binary exponent, without the loss scale."""
    exponents: Counter[int] = Counter()
    if each.scale is None:
        return exponents
    for node in each.runs.gm.graph.nodes:
        value = each.runs.wide[node.name]
        if is_backward(node) and dtype_of(node) is torch.float16 and isinstance(value, Tensor):
            exponents += _exponents(value, each.scale)
    return exponents


def scale_range(exponents: Counter[int]) -> tuple[float, float] | None:
    """The smallest and the largest power of two that suit the values of backward, given by binary exponent.

    Below the one, more than ``LOST`` of them round to zero; above the other, one of them overflows. None for no values.
    """
    if not exponents:
        return None
    lost, smallest = LOST * sum(exponents.values()), 0
    for smallest in sorted(exponents):
        lost -= exponents[smallest]
        if lost < 0:
            break
    return 2.0 ** (_SMALLEST - smallest), 2.0 ** (_LARGEST - max(exponents))


def _exponents(value: Tensor, scale: float) -> Counter[int]:
    sizes = value.abs().flatten()
    sizes = sizes[(sizes > 0) & sizes.isfinite()]
    found, counts = (torch.frexp(sizes).exponent - 1).unique(return_counts=True)
    shift = round(math.log2(scale))
    return Counter({int(e) - shift: int(c) for e, c in zip(found, counts, strict=True)})
