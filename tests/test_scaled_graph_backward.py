"""Every way to run the backward of a scaled graph raises the flags of the gradients that are not finite."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mpcompile.execution import watch as watching
from mpcompile.execution.scaled_graph import ScaledGraph
from tests.scaled_graph_tools import (
    HUGE,
    Net,
    assert_same,
    assert_true,
    batch,
    gradients,
    overflowed,
    record_graphs,
    scaled,
    true_gradients,
)

graphs = pytest.fixture(record_graphs)


def test_backward_raises_the_flags_of_the_gradients_that_are_not_finite() -> None:
    model = Net()
    compiled = scaled(model)
    compiled(batch()).square().mean().backward()
    assert overflowed(model) == []
    model.zero_grad()
    (compiled(batch()).square().mean() * HUGE).backward()
    found = {name: bool(p.grad.isfinite().all()) for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == 4
    assert overflowed(model) == [name for name, finite in found.items() if not finite] != []


@pytest.mark.parametrize("factor", [1.0, HUGE])
def test_autograd_grad_raises_them(factor: float) -> None:
    model = Net()
    found = torch.autograd.grad(scaled(model)(batch()).square().mean() * factor, list(model.parameters()))
    finite = [bool(gradient.isfinite().all()) for gradient in found]
    assert overflowed(model) == [
        name for (name, _), fine in zip(model.named_parameters(), finite, strict=True) if not fine
    ]
    assert all(finite) == (factor == 1.0)


def test_autograd_grad_of_one_parameter_raises_its_flag() -> None:
    model = Net()
    torch.autograd.grad(scaled(model)(batch()).square().mean() * HUGE, [model.up.weight])
    assert "up.weight" in overflowed(model)
    assert all(p.grad is None for p in model.parameters())


def test_backward_into_chosen_inputs_raises_their_flags() -> None:
    model = Net()
    (scaled(model)(batch()).square().mean() * HUGE).backward(inputs=[model.down.weight])
    assert "down.weight" in overflowed(model)
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["down.weight"]


def test_each_of_two_backwards_of_one_forward_raises_them() -> None:
    model = Net()
    output = scaled(model)(batch()).square().mean()
    output.backward(retain_graph=True)
    assert overflowed(model) == []
    once = gradients(model)
    output.backward(retain_graph=True)
    assert_same(gradients(model), [2 * gradient for gradient in once])
    assert overflowed(model) == []
    output.backward(torch.tensor(HUGE))
    assert "up.weight" in overflowed(model)


@pytest.mark.parametrize("position", [0, 1])
def test_one_backward_of_two_forwards_raises_them_for_either(position: int) -> None:
    model = Net()
    compiled = scaled(model)
    losses = [compiled(batch(size)).square().mean() for size in (5, 5)]
    losses[position] = losses[position] * HUGE
    sum(losses).backward()  # type: ignore[union-attr]
    assert "up.weight" in overflowed(model)


def test_one_backward_of_two_forwards_adds_true_gradients() -> None:
    model = Net()
    compiled = scaled(model)
    first, second = batch(), -2 * batch()
    (compiled(first).square().mean() + compiled(second).square().mean()).backward()
    truth = true_gradients(model, lambda m: m(first.double()).square().mean() + m(second.double()).square().mean())
    assert_true(gradients(model), truth)
    assert overflowed(model) == []


def test_a_forward_whose_backward_never_runs_raises_nothing() -> None:
    model = Net()
    compiled = scaled(model)
    _unused = compiled(batch()) * HUGE
    compiled(batch()).square().mean().backward()
    assert overflowed(model) == []


def test_backward_through_a_checkpoint_raises_them() -> None:
    model = Net()
    compiled, x = scaled(model), batch(requires_grad=True)
    compiled(x).square().mean().backward()
    plain = gradients(model)
    model.zero_grad()
    checkpoint(compiled, x, use_reentrant=False).square().mean().backward()
    assert_same(gradients(model), plain)
    assert overflowed(model) == []
    (checkpoint(compiled, x, use_reentrant=False).square().mean() * HUGE).backward()
    assert "up.weight" in overflowed(model)


def test_the_probe_accumulates_no_gradient(graphs: list[ScaledGraph]) -> None:
    model = Net()
    output = scaled(model)(batch()).square().mean()
    torch.autograd.grad(output, [model.up.weight], retain_graph=True)
    output.backward(retain_graph=True)
    (output * HUGE).backward()
    (graph,) = graphs
    assert graph._probe.grad is None
    assert graph._probe.tolist() == [0.0] * 4


def test_every_graph_of_a_model_with_a_break_has_its_own_flags(graphs: list[ScaledGraph]) -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            torch._dynamo.graph_break()
            return self.down(x)

    model = Broken()
    output = scaled(model)(batch())
    torch.autograd.grad(output.square().mean(), [model.up.weight], retain_graph=True)
    assert overflowed(model) == []
    (output.square().mean() * HUGE).backward()
    assert "down.weight" in overflowed(model)
    assert [sorted(graph._slots.values())[-1] for graph in graphs] == ["up.weight", "l_x_"]


def test_a_frozen_parameter_has_no_flag(graphs: list[ScaledGraph]) -> None:
    model = Net()
    model.up.weight.requires_grad_(False)
    (scaled(model)(batch()).square().mean() * HUGE).backward()
    assert sorted(graphs[0]._slots.values()) == ["down.bias", "down.weight", "up.bias"]
    assert watching.watched_among([model.up.weight]) == []
    assert model.up.weight.grad is None
