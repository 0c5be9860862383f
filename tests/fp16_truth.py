"""What fp16 gives for matmuls, computed in fp64: rounded operands, an exact sum and one rounding."""

import torch
from torch import Tensor

# Where numbers are multiples of a common unit and small, sums in fp32 are exact in any order and a result must be
# bitwise that of ``product``; others must lie where ``assert_rounds_the_sum`` says.

INF = float("inf")
LARGEST, SMALLEST = 65504.0, 2.0**-24
TIE_TO_INFINITY = 65520.0
"""Halfway between the largest finite fp16 number and the power of two that would follow it."""


def fp16(values: Tensor) -> Tensor:
    """``values`` rounded to the nearest fp16 number, ties to even, through subnormals and to infinity; in fp64."""
    values = values.double()
    exponent = torch.frexp(values).exponent.clamp_min(-13) - 11
    unit = torch.ldexp(torch.ones_like(values), exponent)
    rounded = torch.round(values / unit) * unit
    rounded = torch.where(rounded.abs() > LARGEST, torch.copysign(torch.full_like(values, INF), values), rounded)
    return torch.where(torch.isfinite(values), rounded, values)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The fp16 matmul of what was rounded to fp16, after making sure that a sum in fp32 is exact."""
    return fp16(accumulated(a, b, bias))


def accumulated(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """That matmul before its result is rounded: how a weight gradient leaves."""
    a, b = fp16(a), fp16(b)
    bias = torch.zeros((), dtype=torch.float64) if bias is None else fp16(bias)
    sizes = [torch.where(torch.isfinite(value), value.abs(), 0.0) for value in (a, b, bias)]
    unit = min(_unit(sizes[0]) * _unit(sizes[1]), _unit(sizes[2]))
    assert (sizes[0] @ sizes[1] + sizes[2]).max() <= 2**24 * unit
    return a @ b + bias


def _unit(values: Tensor) -> float:
    """The largest power of two that all values are multiples of."""
    integers = (values * 2.0**30).long()
    assert torch.equal(integers.double(), values * 2.0**30)
    lowest = (integers & -integers)[integers != 0]
    return float(lowest.min()) * 2.0**-30 if len(lowest) else INF


def assert_rounds_the_sum(found: Tensor, a: Tensor, b: Tensor) -> None:
    """``found`` is the rounding of a sum that fp32 may give for the product of two fp16 matrices."""
    a, b = fp16(a), fp16(b)
    slack = a.shape[-1] * 2.0**-24 * 1.01 * (a.abs() @ b.abs())
    assert (fp16(a @ b - slack) <= found.double()).all()
    assert (found.double() <= fp16(a @ b + slack)).all()


def assert_is_the_sum(found: Tensor, a: Tensor, b: Tensor) -> None:
    """``found`` is a sum that fp32 may give for the product of two fp16 matrices, not rounded again."""
    a, b = fp16(a), fp16(b)
    assert ((found.double() - a @ b).abs() <= a.shape[-1] * 2.0**-24 * 1.01 * (a.abs() @ b.abs())).all()


def same(found: Tensor, truth: Tensor) -> bool:
    """Whether two results are equal, NaN included."""
    return torch.equal(found.double().nan_to_num(nan=-12345.0), truth.nan_to_num(nan=-12345.0))


def integers(*shape: int, bits: int, seed: int = 0) -> Tensor:
    """Random integers of so many bits and either sign."""
    generator = torch.Generator().manual_seed(1000 * seed + 100 * bits + shape[-1])
    return torch.randint(-(2**bits) + 1, 2**bits, shape, generator=generator).float()


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
