"""The gradients that a scaled graph leaves outside are the true ones, whatever the loss scale."""

import pytest
import torch
from torch import Tensor, nn

import mpcompile
from tests.helpers import relative_error
from tests.scaled_graph_tools import (
    BOUND,
    HUGE,
    SCALE,
    Net,
    assert_same,
    assert_true,
    batch,
    gradients,
    overflowed,
    scaled,
    true_gradients,
)
from tests.test_programs import in_fp64


@pytest.mark.parametrize("scale", [16.0, 4096.0])
def test_the_gradient_outside_is_the_true_one_whatever_the_scale(scale: float) -> None:
    model, x = Net(), batch(requires_grad=True)
    scaled(model, loss_scale=scale)(x).square().mean().backward()
    assert_true(gradients(model), true_gradients(model, lambda m: m(x.detach().double()).square().mean()))
    assert x.grad is not None
    exact = x.detach().double().requires_grad_()
    in_fp64(model)(exact).square().mean().backward()
    assert relative_error(x.grad, exact.grad) < BOUND


def test_the_gradient_has_the_same_bits_with_every_scale() -> None:
    model = Net()
    found = []
    for scale in (64.0, 512.0, 4096.0):
        model.zero_grad()
        scaled(model, loss_scale=scale)(batch()).square().mean().backward()
        found.append(gradients(model))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def test_a_hook_on_a_parameter_sees_the_true_gradient() -> None:
    model, seen = Net(), []
    model.down.weight.register_hook(seen.append)
    scaled(model)(batch()).square().mean().backward()
    assert_same(seen, [model.down.weight.grad])  # type: ignore[list-item]


def test_a_scale_that_changes_between_forward_and_backward_still_gives_the_true_gradient() -> None:
    model = Net()
    compiled = scaled(model)
    compiled(batch()).square().mean().backward()
    undisturbed = gradients(model)
    for loaded in (16.0, 8192.0):
        model.zero_grad()
        loss = compiled(batch()).square().mean()
        runtime = mpcompile.runtime(compiled)
        runtime.load_state_dict({**runtime.state_dict(), "scale": loaded})
        loss.backward()
        assert_same(gradients(model), undisturbed)


def test_a_skipped_step_between_forward_and_backward_leaves_the_gradient_true() -> None:
    model = Net()
    compiled, optimizer = scaled(model), torch.optim.SGD(model.parameters(), 0.1)
    compiled(batch()).square().mean().backward()
    undisturbed = gradients(model)
    loss = compiled(batch()).square().mean()
    (compiled(batch()).square().mean() * HUGE).backward()
    optimizer.step()
    assert mpcompile.runtime(compiled).scale == SCALE / 2
    optimizer.zero_grad()
    loss.backward()
    assert_same(gradients(model), undisturbed)


class AddsPositions(Net):
    """The gradient of its last parameter is that of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.positions


def test_a_gradient_that_is_the_gradient_of_the_output_is_the_true_one() -> None:
    model = AddsPositions()
    scaled(model)(batch()).square().mean().backward()
    assert_true(gradients(model), true_gradients(model, lambda m: m(batch().double()).square().mean()))
    assert overflowed(model) == []
