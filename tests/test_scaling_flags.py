"""The flags of loss scaling: exactly the gradients that are not finite."""

import pytest
import torch
from torch import Tensor

from tests.scaling_tools import INF, NAN, custom, flags, leaf, scaled, site

# Dynamo's own, of every custom autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def test_an_input_without_a_gradient_is_never_flagged() -> None:
    def second_is_detached(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a * 2 + b.detach() + c * 3

    gm = scaled(second_is_detached, leaf(2), leaf(2), leaf(2))
    assert site(gm).names == ("l_a_", "l_b_", "l_c_")
    assert flags(gm, tangents_1=torch.tensor([INF, 0.0])) == [1.0, 0.0, 1.0]


def test_an_input_that_asks_for_no_gradient_has_no_flag() -> None:
    gm = scaled(lambda a, b: a * b, torch.randn(2), leaf(2))
    assert site(gm).names == ("l_b_",)
    assert flags(gm) == [0.0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_exactly_the_gradients_that_are_not_finite_are_flagged(bad: float) -> None:
    gm = scaled(lambda a, b, c: (a * 2, b * 3, c.t() * 4), leaf(2, 2), leaf(2, 2), leaf(2, 2))
    tangent = torch.tensor([[1.0, 2.0], [bad, 3.0]])
    assert flags(gm, 2.0**4) == [0.0, 0.0, 0.0]
    assert flags(gm, 2.0**4, tangents_1=tangent) == [1.0, 0.0, 0.0]
    assert flags(gm, 2.0**4, tangents_2=tangent) == [0.0, 1.0, 0.0]
    assert flags(gm, 2.0**4, tangents_1=tangent, tangents_3=tangent) == [1.0, 0.0, 1.0]


def test_the_largest_finite_gradient_is_not_flagged() -> None:
    gm = scaled(lambda a: a * 2, leaf(2))
    largest = torch.finfo(torch.float32).max
    assert flags(gm, 1.0, tangents_1=torch.tensor([largest / 2, -largest / 2])) == [0.0]


def test_an_overflow_of_scaling_itself_is_flagged() -> None:
    gm = scaled(lambda a: a * 2, leaf(2))
    large = torch.tensor([1.0, 2.0**120])
    assert flags(gm, 2.0**4, tangents_1=large) == [0.0]
    assert flags(gm, 2.0**16, tangents_1=large) == [1.0]


def test_a_gradient_that_does_not_depend_on_the_loss_is_flagged_too() -> None:
    gm = scaled(custom(lambda g, x: 1 / x), leaf(2))
    assert flags(gm, primals_1=torch.tensor([1.0, 0.0])) == [1.0]
