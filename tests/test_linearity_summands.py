"""Sums of which some summands lack the factor, and zeros, which have any."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpcompile.passes.graph import output_of
from mpcompile.passes.linearity import carries_factor, is_zero, unscaled_summands
from tests.helpers import call, trace
from tests.linearity_cases import ROWS

SUMMANDS: dict[str, tuple[Callable[..., Any], str, list[str]]] = {
    "a sum": (lambda g, x, rows: g + x, "add", ["x_1"]),
    "a difference": (lambda g, x, rows: x - g, "sub", ["x_1"]),
    "several, in order": (lambda g, x, rows: torch.cat([x, g, x.sin()]), "cat", ["x_1", "sin"]),
    "a choice, not its condition": (lambda g, x, rows: torch.where(g > x, x, g), "where", ["x_1"]),
    "written into a value": (lambda g, x, rows: torch.index_put(x, (rows,), g), "index_put", ["x_1"]),
    "written into the gradient": (lambda g, x, rows: torch.index_put(g, (rows,), x), "index_put", ["x_1"]),
    "zeros have any factor": (lambda g, x, rows: g + torch.zeros_like(x), "add", []),
    "all have it": (lambda g, x, rows: g + g, "add", []),
    "a number has none to give": (lambda g, x, rows: g + 1, "add", []),
    "a product is no sum": (lambda g, x, rows: g * x, "mul", []),
}


@pytest.mark.parametrize("case", SUMMANDS)
def test_the_summands_that_lack_the_factor(case: str) -> None:
    fn, name, expected = SUMMANDS[case]
    gm = trace(fn, torch.randn(3, 3), torch.randn(3, 3), ROWS)
    g = next(iter(gm.graph.nodes))
    assert [node.name for node in unscaled_summands(call(gm, name), {g})] == expected


def test_a_sum_carries_the_factor_once_its_summands_have_it() -> None:
    gm = trace(lambda g, x: torch.cat([x, g, x.sin()]), torch.randn(3), torch.randn(3))
    cat, g = call(gm, "cat"), next(iter(gm.graph.nodes))
    assert not carries_factor(cat, {g})
    assert carries_factor(cat, {g, *unscaled_summands(cat, {g})})


ZEROS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.zeros(3),
    "zeros_like": lambda x: torch.zeros_like(x),
    "new_zeros": lambda x: x.new_zeros(3),
    "full": lambda x: torch.full((3,), 0.0),
    "full_like": lambda x: torch.full_like(x, 0),
    "new_full": lambda x: x.new_full((3,), -0.0),
    "scalar_tensor": lambda x: torch.scalar_tensor(0.0),
    "an expanded view": lambda x: torch.zeros(1, 3).expand(2, 3).unsqueeze(0),
    "another shape": lambda x: torch.zeros(2, 3).view(6),
    "a copy": lambda x: torch.zeros(3).clone(),
    "a cast": lambda x: torch.zeros(3).bfloat16(),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "an input": lambda x: x,
    "a view of an input": lambda x: x.unsqueeze(0),
    "ones": lambda x: torch.ones(3),
    "full": lambda x: torch.full((3,), 1.0),
    "not a number": lambda x: torch.full((3,), float("nan")),
    "scalar_tensor": lambda x: torch.scalar_tensor(2.0),
    "a product": lambda x: x * 0,  # not a number where x is infinite
    "a view of ones": lambda x: torch.ones(1, 3).expand(2, 3),
}


def returned(fn: Callable[[Tensor], Tensor]) -> Any:
    """The node that a function's graph returns."""
    return output_of(trace(fn, torch.randn(3))).args[0]


@pytest.mark.parametrize("case", ZEROS)
def test_zeros_are_known(case: str) -> None:
    assert is_zero(returned(ZEROS[case]))


@pytest.mark.parametrize("case", OTHERS)
def test_what_may_be_other_than_zero_is_not_taken_for_zeros(case: str) -> None:
    assert not is_zero(returned(OTHERS[case]))
