"""Measures of the error of one value, and of its range. All in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
"""The floating-point results of one operation."""


@dataclass(frozen=True, slots=True)
class Range:
    """Which magnitudes a value has, and how they fit into a type."""

    smallest: int | None
    """Binary exponent of the smallest magnitude that is not zero; None where all is zero."""
    largest: int | None
    """Binary exponent of the largest finite magnitude."""
    overflow: float
    """Share of the elements above the largest number of the type."""
    subnormal: float
    """Share of the elements, zeros apart, below its smallest normal number: they keep fewer bits."""
    underflow: float
    """Share of the elements, zeros apart, that it rounds to zero."""


def range_of(values: Tensors, low: torch.dtype) -> Range:
    """The range of ``values`` against that of ``low``."""
    sizes = torch.cat([value.detach().double().abs().flatten() for value in values])
    finite = sizes[sizes.isfinite() & (sizes > 0)]
    info = torch.finfo(low)
    count = max(sizes.numel(), 1)
    return Range(
        smallest=math.frexp(float(finite.min()))[1] - 1 if finite.numel() else None,
        largest=math.frexp(float(finite.max()))[1] - 1 if finite.numel() else None,
        overflow=float((sizes > info.max).sum()) / count,
        subnormal=float((finite < info.smallest_normal).sum()) / count,
        underflow=float((finite <= info.smallest_normal * info.eps / 2).sum()) / count,
    )


def norm(values: Tensors) -> float:
    """The Euclidean norm over all results of an operation."""
    return math.sqrt(sum(float(value.double().square().sum()) for value in values))


def distance(found: Tensors, truth: Tensors) -> float:
    """The norm of ``found - truth``; infinite where one is not finite and the other is."""
    total = 0.0
    for first, second in zip(found, truth, strict=True):
        difference = first.double() - second.double()
        agree = (first == second) | (first.isnan() & second.isnan())  # equal infinities are no error
        total += float(difference.masked_fill(agree, 0.0).square().sum())
    return math.sqrt(total) if math.isfinite(total) else math.inf


def ratio(error: float, size: float) -> float:
    """``error`` relative to ``size``; no error is none of nothing, too; infinite where either is not a number."""
    if error == 0:
        return 0.0
    if math.isnan(error) or math.isnan(size) or not size:
        return math.inf
    return error / size


def worst_element(found: Tensors, truth: Tensors) -> float:
    """The largest error of an element, relative to the root mean square of ``truth``."""
    largest = max(
        (
            float((a.double() - b.double()).abs().nan_to_num(nan=math.inf).max())
            for a, b in zip(found, truth, strict=True)
            if a.numel()
        ),
        default=0.0,
    )
    count = sum(value.numel() for value in truth)
    return ratio(largest, norm(truth) / math.sqrt(max(count, 1)))


def in_ulps(error: float, truth: Tensors, low: torch.dtype) -> float:
    """An error in units in the last place of ``low``: relative to the norm of the spacing of ``low`` at ``truth``.

    The spacing at x is 2^floor(log2 |x|) times the eps of the type; correct rounding makes about 0.3.
    """
    info = torch.finfo(low)
    spacings = []
    for value in truth:
        exponent = torch.frexp(value.double()).exponent - 1
        spacings.append(torch.ldexp(torch.full_like(value, info.eps, dtype=torch.float64), exponent))
    return ratio(error, norm(spacings))
