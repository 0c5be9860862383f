"""fp16's range: numbers beyond it, and operations that have one as a constant, which stay in fp32."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpcompile.passes import Decision, Policy, plan_compute
from mpcompile.passes.range_guard import beyond_range
from tests.helpers import call, operand_dtypes, run_flat, trace
from tests.range_guard_tools import FP16, INF, NAN, A, B, rewritten

BEYOND = [65504.01, -65505.0, 1e9, 2.0**-25, -1e-9]
WITHIN = [65504.0, -65504.0, 2.0**-24, -(2.0**-24), 1.0, 0.0, INF, -INF, NAN]


@pytest.mark.parametrize("value", BEYOND)
def test_numbers_beyond_range(value: float) -> None:
    assert beyond_range([1.0, value, 1e30]) == value


@pytest.mark.parametrize("value", WITHIN)
def test_numbers_within_range_and_what_is_no_finite_number(value: float) -> None:
    assert beyond_range([value]) is None


def test_sizes_and_other_values_do_not_count() -> None:
    assert beyond_range([100000, True, None, "1e9", A, torch.float32]) is None


Call = Callable[[Tensor, Tensor, float], Tensor]

CONSTANTS: dict[str, tuple[str, Call]] = {
    "addmm alpha": ("addmm", lambda a, b, c: torch.addmm(a, a, b, alpha=c)),
    "addmm beta": ("addmm", lambda a, b, c: torch.addmm(a, a, b, beta=c)),
    "baddbmm alpha": ("baddbmm", lambda a, b, c: torch.baddbmm(a[None], a[None], b[None], alpha=c)),
    "baddbmm beta": ("baddbmm", lambda a, b, c: torch.baddbmm(a[None], a[None], b[None], beta=c)),
    "attention scale": (
        "_scaled_dot_product_flash_attention_for_cpu",
        lambda a, b, c: F.scaled_dot_product_attention(a[None, None], b[None, None], b[None, None], scale=c),
    ),
}


def decision(op: str, fn: Call, constant: float, policy: Policy = FP16) -> Decision:
    """The decision for the only call of ``op`` in ``fn``."""
    gm = trace(lambda a, b: fn(a, b, constant), A, B)
    return plan_compute(gm, policy)[call(gm, op)]


@pytest.mark.parametrize("case", CONSTANTS)
def test_an_operation_with_a_constant_beyond_range_stays_fp32(case: str) -> None:
    for constant in BEYOND:
        found = decision(*CONSTANTS[case], constant)
        assert found == Decision("fp32", "range guard", f"its constant {constant:g} is beyond float16")


@pytest.mark.parametrize("case", CONSTANTS)
def test_an_operation_with_another_constant_is_low(case: str) -> None:
    assert {decision(*CONSTANTS[case], constant).precision for constant in WITHIN} == {"low"}


@pytest.mark.parametrize("case", CONSTANTS)
def test_bf16_has_the_range_of_fp32(case: str) -> None:
    assert decision(*CONSTANTS[case], 1e9, Policy(dtype=torch.bfloat16)).precision == "low"


@pytest.mark.parametrize("case", CONSTANTS)
def test_an_operation_with_such_a_constant_is_as_in_fp32(case: str) -> None:
    fn = CONSTANTS[case][1]
    for constant in (1e5, 1e-9):
        (found,) = run_flat(rewritten(trace(functools.partial(fn, c=constant), A, B)), A, B)
        truth = fn(A.double(), B.double(), constant)
        assert (found.double() - truth).abs().max() <= 2.0**-20 * max(1.0, float(truth.abs().max()))


def test_the_passes_leave_such_an_operation_its_fp32_operands() -> None:
    gm = rewritten(trace(lambda a, b: torch.addmm(a, a, b, alpha=1e5) @ b, A, B))
    assert operand_dtypes(call(gm, "addmm")) == {torch.float32}
    assert operand_dtypes(call(gm, "mm")) == {torch.float16}
