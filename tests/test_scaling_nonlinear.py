"""A backward that is not linear in the gradient sees the true one, and what follows the scaled one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpcompile.passes import run_passes
from tests.helpers import calls, reasons
from tests.scaling_tools import (
    FP16,
    SCALES,
    custom,
    gradients,
    joint_graph,
    leaf,
    same_bits,
    scale,
    scaled,
)

# Dynamo's own, of every custom autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


BACKWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clips": lambda g, x: g.clamp(-0.5, 0.5),
    "clips, then multiplies": lambda g, x: g.clamp(-0.5, 0.5) @ x.t() @ x,
    "squares": lambda g, x: g * g,
    "takes the sign": lambda g, x: g.sign() * 0.1,
    "rounds": lambda g, x: (g * 4).round() / 4,
    "keeps what is positive": lambda g, x: torch.where(g > 0, g, torch.zeros_like(g)),
    "keeps what is large": lambda g, x: torch.where(g.abs() > 0.5, g, 0.1 * g),
    "adds a number": lambda g, x: g + 0.01,
    "adds a tensor": lambda g, x: g + 0.01 * x,
    "adds a constant tensor": lambda g, x: g + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "divides by the norm": lambda g, x: g / g.norm(),
    "sorts": lambda g, x: g.sort(1).values,
    "takes what is largest": lambda g, x: torch.zeros_like(g).scatter(1, g.topk(1).indices, 1.0),
    "is constant": lambda g, x: torch.ones_like(g),
    "is the argument": lambda g, x: x.clone(),
    "mixes": lambda g, x: torch.cat([g[:1], x[1:2], g[2:].clamp(-0.5, 0.5)]),
    "fills in a number": lambda g, x: g.masked_fill(x > 0, 3.0),
    "convolves with a bias": lambda g, x: F.conv1d(g[None], torch.ones(3, 3, 1), torch.ones(3))[0],
    "multiplies and adds a bias": lambda g, x: F.linear(g, torch.ones(4, 4), torch.ones(4)),
    "divides and rounds": lambda g, x: torch.div(g, 0.5, rounding_mode="floor"),
    "stores eight bits": lambda g, x: (g * 16).to(torch.int8).float() / 16,
    "masks": lambda g, x: x * g.bool(),
}


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_backward_that_is_not_linear_sees_the_true_gradient(backward: str) -> None:
    gm = joint_graph(custom(BACKWARDS[backward]), leaf(3, 4))
    truth = gradients(gm)
    scale(gm)
    for factor in SCALES:
        assert same_bits(gradients(gm, factor), truth)


@pytest.mark.parametrize("name", ["clamp", "sort"])
def test_what_is_not_linear_is_scaled_again_for_what_follows(name: str) -> None:
    def apply(g: Tensor) -> Tensor:
        return g.clamp(-1, 1) if name == "clamp" else g.sort(1).values

    gm = joint_graph(custom(lambda g, x: apply(g) @ x), leaf(2, 2))
    run_passes(gm, FP16)
    tiny = torch.eye(2) * 2.0**-30  # float16 has no such number: the product must be one of scaled values
    found = gradients(gm, 2.0**16, primals_1=torch.eye(2), tangents_1=tiny)
    assert same_bits(found, [apply(tiny)])


def test_a_backward_that_adds_a_size_sees_the_true_gradient() -> None:
    gm = joint_graph(custom(lambda g, x: g + x.shape[0]), leaf(3, 4), dynamic=True)
    truth = gradients(gm)
    scale(gm)
    # Its operand is unscaled and its result scaled: what is added is the same, so are the bits.
    assert same_bits(gradients(gm, 2.0**10), truth)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Tensor:
        return incoming[0].clamp(-0.5, 0.5)


def test_a_branch_carries_the_factor() -> None:
    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x * 3, (x,))

    gm = joint_graph(branches, leaf(3))
    truth = gradients(gm)
    scale(gm)
    assert same_bits(gradients(gm, 2.0**10), truth)


def test_a_branch_that_is_not_linear_sees_the_true_gradient() -> None:
    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: Clip.apply(x), lambda x: Clip.apply(x * 3), (x,))

    gm = joint_graph(branches, leaf(3))
    truth = gradients(gm)
    scale(gm)
    assert same_bits(gradients(gm, 2.0**10), truth)


def test_a_true_value_is_computed_once_for_all_its_readers() -> None:
    gm = scaled(custom(lambda g, x: g.sign() + g.round() + g.abs()), leaf(3))
    assert len([node for node in calls(gm) if node.name.startswith("true_")]) == 1


def test_the_changes_tell_which_operation_is_not_linear() -> None:
    gm = joint_graph(custom(lambda g, x: g.round()), leaf(3))
    assert any("aten.round" in reason for reason in reasons(scale(gm)))
