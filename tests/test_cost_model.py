"""cost_model: bytes and roundings of single values, on graphs small enough to count by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mpcompile.passes import Policy, fold_casts, insert_casts, run_passes
from mpcompile.passes.cost_model import PRESETS, CostModel, Value
from mpcompile.passes.minimum_cut import NEVER
from tests.helpers import call, calls, joint, trace

A, W = torch.randn(4, 4), torch.randn(4, 4)
WEIGHTS = PRESETS["default"]


def model(fn: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, CostModel]:
    gm = trace(fn, *inputs)
    run_passes(gm, Policy(), (insert_casts, fold_casts))
    return gm, CostModel(gm.graph, torch.bfloat16, WEIGHTS, set())


def value(fn: Callable[..., Any], *inputs: Tensor) -> Value | None:
    """The costs of the value of the tanh."""
    gm, costs = model(fn, *inputs)
    return costs.value(call(gm, "tanh"))


def test_bytes_of_readers_in_later_kernels() -> None:
    def fn(x: Tensor, w: Tensor, readers: int) -> Tensor:
        z = y = x.tanh()
        for _ in range(readers):
            z = (z @ w) * y
        return z

    for readers, graph in enumerate((lambda x, w: fn(x, w, 1), lambda x, w: fn(x, w, 2), lambda x, w: fn(x, w, 3)), 1):
        found = value(graph, A, W)
        assert found is not None
        # The fp32 form is no longer written, and each kernel reads two bytes less.
        assert found.for_sooner == -4 - 2 * readers
        assert (found.for_later, found.later, len(found.sooner)) == (0.0, (), readers)
        assert found.rounding == WEIGHTS.rounding


def test_a_reader_in_the_same_kernel_saves_nothing() -> None:
    found = value(lambda x, w: ((y := x.tanh()) @ w, y.sin()), A, W)
    assert found is not None
    assert found.for_sooner == 0.0


def test_a_value_without_a_low_form_has_to_be_narrowed_first() -> None:
    found = value(lambda x, w: (x @ w) * x.tanh(), A, W)
    assert found is not None
    assert found.for_sooner == 2 - 4 - 2


def test_what_an_unrounded_reader_needs_in_memory_is_written_all_the_same() -> None:
    found = value(lambda x, w: (((y := x.tanh()) @ w) * y, y.topk(2)), A, W)
    assert found is not None
    assert found.for_sooner == -2


PRICES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], float]] = {
    "any value": (lambda x, w: ((y := x.tanh()) @ w) * y, (A, W), WEIGHTS.rounding),
    "a stream": (lambda x, w: ((y := x.tanh()) @ w) + y, (A, W), WEIGHTS.carried),
    "a stream through a view": (lambda x, w: ((y := x.tanh()) @ w).view(16) + y.view(16), (A, W), WEIGHTS.carried),
    "before a convolution": (
        lambda x, k: F.conv2d(y := x.tanh(), k) + y,
        (torch.randn(1, 2, 4, 4), torch.randn(2, 2, 1, 1)),
        WEIGHTS.convolved,
    ),
}


@pytest.mark.parametrize("kind", PRICES)
def test_prices_of_a_rounding(kind: str) -> None:
    fn, inputs, price = PRICES[kind]
    found = value(fn, *inputs)
    assert found is not None
    assert found.rounding == price


def test_the_sum_of_two_rounded_values_is_cheap_to_round() -> None:
    gm, costs = model(lambda x, w: ((s := x @ w + w @ x) @ w) * s, A, W)
    found = costs.value(call(gm, "add"))
    assert found is not None
    assert found.rounding == WEIGHTS.repeated


LEFT_ALONE: dict[str, Callable[..., Any]] = {
    "no reader may": lambda x, w: (x.tanh().sum(), x @ w),
    "only products read it": lambda x, w: x.tanh() @ w,
    "an output": lambda x, w: (x.tanh(), x @ w),
    "read by more elements than it has": lambda x, w: (x @ w) * x[0].tanh(),
    "not fp32": lambda x, w: (x.double().tanh().sin(), x @ w),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_values_that_are_left_alone(kind: str) -> None:
    assert value(LEFT_ALONE[kind], A, W) is None


def test_inputs_views_and_casts_are_no_values() -> None:
    gm, costs = model(lambda x, w: ((x @ w) * x.view(2, 8).sin().view(4, 4)).sin(), A, W)
    values = [node.name for node in gm.graph.nodes if costs.value(node) is not None]
    assert values == ["sin", "mul"]
    assert all(costs.value(node) is None for node in gm.graph.nodes if node not in calls(gm))


class Gate(nn.Module):
    """[N, 4] -> [N, 4]: a relu whose low copy a product reads, or not."""

    def __init__(self, is_operand: bool) -> None:
        super().__init__()
        self.weight, self.is_operand = nn.Parameter(W.clone()), is_operand

    def forward(self, x: Tensor) -> Tensor:
        y = (x[None] @ self.weight[None])[0].relu()  # a batched product, in fp32 here
        return y @ self.weight if self.is_operand else y


def gate(low: torch.dtype, *, is_operand: bool, rows: int = 4) -> Value | None:
    """The costs of the value of the relu under ``accurate``."""
    torch._dynamo.reset()
    gm = joint(Gate(is_operand), torch.randn(rows, 4, requires_grad=True))
    run_passes(gm, Policy(dtype=low, fp32=("op:bmm",)), (insert_casts, fold_casts))
    return CostModel(gm.graph, low, PRESETS["accurate"], set()).value(call(gm, "relu"))


def test_a_mask_is_read_off_the_low_form_that_is_held_anyway() -> None:
    found = gate(torch.bfloat16, is_operand=True)
    assert found is not None
    # Instead of a byte held, written and read again, two are read.
    assert (found.for_later, found.rounding_later, len(found.later)) == (-1.0, 0.0, 1)


def test_a_mask_is_no_reason_to_hold_a_low_form() -> None:
    found = gate(torch.bfloat16, is_operand=False)
    assert found is not None
    # Two bytes held, written and read, instead of one.
    assert (found.for_later, found.rounding_later, len(found.later)) == (3.0, 0.0, 1)


def test_fp16_rounds_small_numbers_to_zero_and_has_no_signs_to_offer() -> None:
    assert gate(torch.float16, is_operand=True) is None


def test_of_a_value_without_elements_there_is_nothing_to_decide() -> None:
    assert gate(torch.bfloat16, is_operand=True, rows=0) is None


def test_accurate_prices_no_rounding_at_all() -> None:
    accurate, default, fast = PRESETS["accurate"], PRESETS["default"], PRESETS["fast"]
    for name in ("rounding", "carried", "convolved", "repeated", "gradient"):
        assert getattr(accurate, name) == NEVER
        assert 0 < getattr(fast, name) < getattr(default, name)
