"""fp16's range: operands filled with constants beyond it keep the operations that read them in fp32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpcompile.passes import Decision, Policy, plan_compute
from mpcompile.passes.graph import is_backward
from tests.helpers import calls, joint, operand_dtypes, run_flat, trace
from tests.range_guard_tools import FP16, INF, A, B, in_fp16, rewritten, rules_of

FILLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "full": lambda x, c: torch.full((4, 4), c),
    "full_like": lambda x, c: torch.full_like(x, c),
    "new_full": lambda x, c: x.new_full((4, 4), c),
    "masked_fill": lambda x, c: x.masked_fill(x > 0, c),
    "where, a number": lambda x, c: torch.where(x > 0, x, c),
    "where, a full": lambda x, c: torch.where(x > 0, torch.full((), c), x),
    "where in where": lambda x, c: torch.where(x > 1, x, torch.where(x > 0, x, c)),
    "pad": lambda x, c: F.pad(x[:, :3], (0, 1), value=c),
    "a view": lambda x, c: torch.full((16,), c).view(4, 4).t(),
    "expanded": lambda x, c: torch.full((1, 4), c).expand(4, 4),
}


def filled(name: str, constant: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A matmul that reads a filled operand, and one that does not."""
    return lambda x, w: (FILLS[name](x, constant) @ w, x @ w)


def decisions(fn: Callable[[Tensor, Tensor], Any], policy: Policy) -> list[Decision]:
    """The decisions for the matmuls of ``fn``."""
    gm = trace(fn, A, B)
    plan = plan_compute(gm, policy)
    return [plan[node] for node in calls(gm, "mm")]


@pytest.mark.parametrize("name", FILLS)
def test_an_operation_with_a_filled_operand_stays_fp32(name: str) -> None:
    for constant in (-1e9, 1e-9):
        first, second = decisions(filled(name, constant), FP16)
        assert first == Decision("fp32", "range guard", f"an operand is filled with {constant:g}, beyond float16")
        assert second.precision == "low"


@pytest.mark.parametrize("name", FILLS)
def test_an_operand_filled_with_another_constant_is_read_low(name: str) -> None:
    for constant in (65504.0, -INF, 0.0):
        assert {found.precision for found in decisions(filled(name, constant), FP16)} == {"low"}


@pytest.mark.parametrize("name", FILLS)
def test_bf16_reads_filled_operands_low(name: str) -> None:
    assert {found.precision for found in decisions(filled(name, -1e9), Policy())} == {"low"}


@pytest.mark.parametrize("name", ["full", "masked_fill", "pad"])
def test_backward_reads_a_filled_operand_in_fp32_as_well(name: str) -> None:
    gm = rewritten(joint(filled(name, 1e9), A.clone().requires_grad_(), B.clone().requires_grad_(), low=torch.float16))
    kept = [is_backward(node) for node in calls(gm, "mm") if operand_dtypes(node) == {torch.float32}]
    # The product itself, and the gradient of its other operand.
    assert kept == [False, True]


def test_a_result_that_is_filled_is_no_operand() -> None:
    (found,) = decisions(lambda x, w: (x @ w).masked_fill(x > 0, -1e9).softmax(-1), FP16)
    assert found.precision == "low"


@pytest.mark.parametrize("name", FILLS)
def test_a_product_with_a_filled_operand_is_as_in_fp32(name: str) -> None:
    for constant in (1e9, 1e-9):
        found = run_flat(rewritten(trace(filled(name, constant), A, B)), A, B)[0]
        operand = FILLS[name](A, constant)
        error = (found.double() - operand.double() @ B.double()).abs()
        assert (error <= 8 * 2.0**-24 * (operand.double().abs() @ B.double().abs())).all()


ATTENDED: dict[str, Callable[[Tensor], Tensor]] = {
    "full": lambda x: torch.full_like(x, 1e5),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1e5),
}


@pytest.mark.parametrize("how", ATTENDED)
def test_attention_with_a_filled_operand_stays_fp32(how: str) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(1, 1, 3, 4)
    compiled = in_fp16(lambda x: F.scaled_dot_product_attention(layer(x), x, ATTENDED[how](x)))
    found = compiled(x)
    assert rules_of(compiled) == ["class", "range guard"]
    assert torch.isfinite(found).all()
