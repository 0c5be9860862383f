"""The emulation of fp16 on a CPU without it, node by node: bit for bit what one rounding of an exact sum gives."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from mpcompile import joint_pass
from mpcompile.passes import Policy, run_passes
from mpcompile.passes.emulation import emulate_low_products
from tests.fp16_truth import INF, assert_rounds_the_sum, fp16, product, same
from tests.helpers import run_flat, trace


@pytest.fixture(scope="module", autouse=True)
def _no_native_fp16() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_pass, "has_native_fp16", lambda _: False)
        yield


def test_the_rounding_of_this_file_is_that_of_torch() -> None:
    halves = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).double()
    halves = halves[torch.isfinite(halves)]
    between = (halves[1:] + halves[:-1]) / 2
    beyond = torch.tensor([65519.99, 65520.0, 65536.0, 1e9, INF], dtype=torch.float64)
    for values in (halves, between, between * (1 + 1e-6), between * (1 - 1e-6), beyond):
        for sign in (1, -1):
            assert torch.equal(fp16(sign * values), (sign * values).to(torch.float16).double())


def emulated(fn: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """A function rewritten for fp16 and emulated."""
    gm = trace(fn, *inputs)
    run_passes(gm, Policy(dtype=torch.float16))
    emulate_low_products(gm, Policy(dtype=torch.float16))
    gm.recompile()
    return gm


QUICK = settings(
    max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def mm() -> fx.GraphModule:
    return emulated(torch.mm, torch.randn(3, 4), torch.randn(4, 2))


def matrices(element: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[Tensor, Tensor]]:
    """Two matrices to multiply, [3, 4] and [4, 2]."""
    lists = st.tuples(st.lists(element, min_size=12, max_size=12), st.lists(element, min_size=8, max_size=8))
    return lists.map(lambda pair: (torch.tensor(pair[0]).view(3, 4), torch.tensor(pair[1]).view(4, 2)))


def on_grid(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Bring the operands close enough that a sum in fp32 of their products is exact."""
    return pair[0].clamp(-4096, 4096).round(), pair[1].clamp(-63, 63).round()


@QUICK
@given(matrices(st.integers(-5000, 5000).map(float)).map(on_grid), st.integers(-24, 5), st.integers(-8, 4))
def test_any_product_of_integers_is_bitwise(
    mm: fx.GraphModule, pair: tuple[Tensor, Tensor], power: int, other: int
) -> None:
    x, w = pair[0] * 2.0**power, pair[1] * 2.0**other
    assert same(run_flat(mm, x, w)[0], product(x, w))


@QUICK
@given(matrices(st.floats(-300, 300, width=32)))
def test_any_product_is_the_rounding_of_a_sum_in_fp32(mm: fx.GraphModule, pair: tuple[Tensor, Tensor]) -> None:
    assert_rounds_the_sum(run_flat(mm, *pair)[0], *pair)


@QUICK
@given(matrices(st.sampled_from([0.0, 1.0, -1.0, 65504.0, 65519.0, 65520.0, -65520.0, 1e9])))
def test_operands_at_the_edge_of_the_range(mm: fx.GraphModule, pair: tuple[Tensor, Tensor]) -> None:
    x, w = pair[0], pair[1].clamp(-1, 1)
    assert same(run_flat(mm, x, w)[0], product(x, w))
