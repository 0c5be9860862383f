"""fp16 programs with unusual values where they meet the user's: bf16 outputs, written inputs, free parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.helpers import relative_error
from tests.test_programs import in_fp64
from tests.test_programs_fp16 import BOUND, SCALES, Two, check_scales, fp16, set_scale, small


@pytest.fixture(autouse=True)
def _nothing_counted() -> None:
    counters.clear()


class Narrow(Two):
    """An output in bf16, whose tangents are bf16."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.dtype is torch.float64 else y.bfloat16()


def test_tangents_in_bf16() -> None:
    # One rounding of the output and one of its tangent by up to 2^-9 come on top.
    check_scales(Narrow(), torch.randn(4, 8, requires_grad=True), bound=2.0**-7)


class MutatesInput(Two):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


def test_input_that_needs_a_gradient_and_is_written_into() -> None:
    # What was written is an output of the graph, with a tangent of its own.
    def around(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
        def program(x: Tensor) -> Any:
            middle = x * 1.5
            return call(middle), middle * middle

        return program

    check_scales(MutatesInput(), torch.randn(4, 8, requires_grad=True), around=around)


def test_function_over_parameters() -> None:
    weight = nn.Parameter(torch.randn(8, 8) / 3)
    exact = in_fp64(weight)

    def product(x: Tensor, other: Tensor | None = None) -> Tensor:
        return (x @ (weight if other is None else other)).tanh()

    x = torch.randn(4, 8)
    small(lambda x: product(x, exact))(x.double()).sum().backward()
    compiled, found = fp16(product), []
    for scale in SCALES:
        set_scale(compiled, scale)
        weight.grad = None
        small(compiled)(x).sum().backward()
        found.append(weight.grad)
    assert relative_error(found[0], exact.grad) < BOUND
    assert torch.equal(*found)
