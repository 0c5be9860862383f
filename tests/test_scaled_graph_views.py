"""Outputs that are views, or written into an input, do not keep the flags of a scaled graph from being right."""

import pytest
import torch
from torch import Tensor

from mpcompile.execution.scaled_graph import ScaledGraph
from tests.helpers import relative_error
from tests.scaled_graph_tools import (
    BOUND,
    HUGE,
    Net,
    WithView,
    assert_true,
    batch,
    gradients,
    overflowed,
    record_graphs,
    scaled,
)
from tests.test_programs import in_fp64

graphs = pytest.fixture(record_graphs)


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_an_output_that_is_a_view_of_an_input_is_no_obstacle(needs_gradient: bool) -> None:
    model, x = WithView(), batch(requires_grad=needs_gradient)
    output, view = scaled(model)(x)
    assert view.data_ptr() == x.data_ptr()
    (output.square().mean() + view.sum()).backward()
    exact = in_fp64(model)
    inputs = x.detach().double().requires_grad_(needs_gradient)
    (exact(inputs)[0].square().mean() + exact(inputs)[1].sum()).backward()
    assert_true(gradients(model), gradients(exact))
    assert overflowed(model) == []
    if needs_gradient:
        assert_true([x.grad], [inputs.grad])  # type: ignore[list-item]


def test_a_loss_of_the_view_alone_raises_nothing() -> None:
    model, x = WithView(), batch(requires_grad=True)
    _, view = scaled(model)(x)
    (view.sum() * HUGE).backward()
    assert overflowed(model) == []
    assert torch.equal(x.grad, torch.full_like(x, HUGE))  # type: ignore[arg-type]


def test_an_output_that_is_a_view_of_a_result_raises_flags() -> None:
    class Viewed(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            result = super().forward(x)
            return result.t(), result.view(-1)[2:]

    model = Viewed()
    compiled = scaled(model)
    for index in (0, 1):
        torch.autograd.grad(compiled(batch())[index].square().mean(), [model.up.weight])
        assert overflowed(model) == []
    (compiled(batch())[1].square().mean() * HUGE).backward()
    assert "up.weight" in overflowed(model)


def overflow_behind(value: Tensor) -> None:
    """Let what computed ``value`` overflow in backward, and nothing that reads it."""
    value.register_hook(lambda gradient: gradient * HUGE)


def test_an_output_that_is_a_view_of_another_graphs_output_is_not_confused_with_it() -> None:
    first, second = Net(), WithView()
    compiled = scaled(first), scaled(second)
    for overflow in (False, True):
        made = compiled[0](batch())
        output, view = compiled[1](made)
        if overflow:
            overflow_behind(made)
        (output.square().mean() + view.square().mean()).backward()
        assert overflowed(second) == []
        assert ("up.weight" in overflowed(first)) == overflow
    truth_of = [first, second]
    for model in truth_of:
        model.zero_grad()
    output, view = compiled[1](compiled[0](batch()))
    (output.square().mean() + view.square().mean()).backward()
    exact = [in_fp64(model) for model in truth_of]
    for model in exact:
        model.zero_grad()
    output, view = exact[1](exact[0](batch().double()))
    (output.square().mean() + view.square().mean()).backward()
    assert (
        relative_error(
            torch.cat([g.view(-1) for g in gradients(first)]), torch.cat([g.view(-1) for g in gradients(exact[0])])
        )
        < 2 * BOUND
    )  # through both models


def test_nor_is_one_of_the_same_graph_on_another_model(graphs: list[ScaledGraph]) -> None:
    first, second = WithView(), WithView()
    compiled = scaled(first), scaled(second)
    x = batch(requires_grad=True) * 1  # no leaf, as what the second is called on
    made, _ = compiled[0](x)
    overflow_behind(made)
    output, view = compiled[1](made)
    (output.square().mean() + view.square().mean()).backward()
    assert len(graphs) == 1
    assert "up.weight" in overflowed(first)
    assert overflowed(second) == []


def test_nor_is_one_of_the_same_graph_on_the_same_model(graphs: list[ScaledGraph]) -> None:
    model = WithView()
    compiled = scaled(model)
    made, _ = compiled(batch(requires_grad=True) * 1)
    output, view = compiled(made)
    (output.square().mean() + view.square().mean()).backward()
    exact = in_fp64(model)
    exact.zero_grad()
    output, view = exact(exact(batch().double())[0])
    (output.square().mean() + view.square().mean()).backward()
    found, truth = (torch.cat([g.view(-1) for g in gradients(m)]) for m in (model, exact))
    assert relative_error(found, truth) < 2 * BOUND  # through the model twice
    assert overflowed(model) == []
    assert [graph._probe.grad for graph in graphs] == [None]


def test_a_result_written_into_an_input_raises_flags(graphs: list[ScaledGraph]) -> None:
    class Writes(Net):
        def forward(self, x: Tensor, into: Tensor) -> None:  # type: ignore[override]
            into.add_(super().forward(x))

    model = Writes()
    compiled = scaled(model)
    for factor in (1.0, HUGE):
        into = torch.zeros(5, 3)
        compiled(batch(), into)
        (into.square().mean() * factor).backward()
        assert ("up.weight" in overflowed(model)) == (factor == HUGE)
    assert [graph._probe.grad for graph in graphs] == [None]
