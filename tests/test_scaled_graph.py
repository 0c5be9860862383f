"""A compiled graph is called with the loss scale, and every way to run its backward reports to the right flags."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import mpcompile
from mpcompile import loss_scaling
from mpcompile.execution import watch as watching
from mpcompile.execution.loss_scale import DynamicLossScale
from mpcompile.execution.runtime import Runtime
from mpcompile.execution.scaled_graph import ScaledGraph, make_probe
from tests.helpers import relative_error
from tests.test_programs import in_fp64, mixprec

SCALE = 1024.0
HUGE = 1e30
"""A factor on a gradient that is finite in fp32 and infinite in fp16."""
BOUND = 4 * 2.0**-11
"""Relative error allowed: two matmuls in a row, each of two operands rounded to fp16, err by at most 2^-11 each."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class WithView(Net):
    """Returns a view of its input as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x.view(-1)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[ScaledGraph]:
    """Every scaled graph that is compiled from now on."""
    found: list[ScaledGraph] = []

    class Recorded(ScaledGraph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(loss_scaling, "ScaledGraph", Recorded)
    return found


def scaled(model: Callable[..., Any], **options: Any) -> Any:
    return mixprec(model, **{"dtype": "fp16", "loss_scale": {"init_scale": SCALE}, **options})


def overflowed(model: nn.Module) -> list[str]:
    """The names of the parameters that a flag is raised for."""
    names = []
    for name, parameter in model.named_parameters():
        for flags, slot in watching._watched[id(parameter)].flags():
            names += [name] if flags.raised([slot]).item() else []
    return names


def batch(size: int = 5, **options: Any) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(size), **options)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def true_gradients(model: nn.Module, loss: Callable[[Any], Tensor]) -> list[Tensor]:
    """Those of the model in fp64."""
    exact = in_fp64(model)
    exact.zero_grad()
    loss(exact).backward()
    return gradients(exact)


def assert_true(found: list[Tensor], truth: list[Tensor]) -> None:
    assert len(found) == len(truth) > 0
    for one, other in zip(found, truth, strict=True):
        assert one.dtype is torch.float32
        assert relative_error(one, other) < BOUND


def assert_same(found: list[Tensor], others: list[Tensor]) -> None:
    """Bit by bit."""
    assert len(found) == len(others) > 0
    assert all(map(torch.equal, found, others))


# Gradients.


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


# Ways to run backward.


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


# Outputs that are views.


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


# Calls that are not trained.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_leaves_no_trace(mode: Callable[[], Any], graphs: list[ScaledGraph]) -> None:
    model = Net()
    compiled = scaled(model)
    with mode():
        output = compiled(batch())
    assert not output.requires_grad
    assert relative_error(output, in_fp64(model)(batch().double())) < BOUND
    assert graphs == []
    assert watching.watched_among(model.parameters()) == []


def test_a_call_without_gradients_between_two_with_changes_nothing() -> None:
    model = Net()
    compiled = scaled(model)
    compiled(batch()).square().mean().backward()
    once = gradients(model)
    model.zero_grad()
    loss = compiled(batch()).square().mean()
    with torch.no_grad():
        compiled(batch())
    loss.backward()
    assert_same(gradients(model), once)
    assert overflowed(model) == []


def test_a_call_on_fake_tensors_uses_the_examples_and_makes_no_flags() -> None:
    # DDP compiles a graph with what the one before returns for fake inputs.
    with FakeTensorMode() as mode:
        examples = mode.from_tensor(torch.ones(())), mode.from_tensor(torch.ones(1))
        fake = mode.from_tensor(torch.ones(2))
    seen: list[tuple[Any, ...]] = []

    def find_owner() -> Any:
        raise AssertionError("nobody owns a fake parameter")

    graph = ScaledGraph(lambda *args: seen.append(args), {0: "x"}, (torch.ones(()), torch.ones(1)), find_owner)
    graph._examples = examples
    graph(fake)
    ((found, scale, probe),) = seen
    assert (found is fake, scale is examples[0], probe is examples[1]) == (True, True, True)
    assert graph._flags == {}


# Whose flags.


def test_models_that_share_a_graph_have_flags_of_their_own(graphs: list[ScaledGraph]) -> None:
    first, second = Net(), Net()
    losses = [scaled(model)(batch()).square().mean() for model in (first, second)]
    (losses[0] + losses[1] * HUGE).backward()
    assert len(graphs) == 1
    assert len(graphs[0]._flags) == 2
    assert overflowed(first) == []
    assert "up.weight" in overflowed(second)


def test_the_owner_is_looked_for_once_for_each_model() -> None:
    runtime, asked = Runtime(DynamicLossScale(), "policy"), []
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    model = nn.Module()
    model.register_parameter("found", parameters[0])

    def find_owner() -> Any:
        asked.append(1)
        return runtime, model

    probe = make_probe(1, torch.device("cpu"))
    graph = ScaledGraph(lambda parameter, *_: (parameter,), {0: "slot"}, (torch.ones(()), probe), find_owner)
    for _ in range(3):
        for parameter in parameters:
            graph(parameter)
    assert len(asked) == 2
    assert [watching._watched[id(parameter)].name for parameter in parameters] == ["found", "slot"]


def test_the_graph_is_given_the_present_scale() -> None:
    runtime, seen = Runtime(DynamicLossScale(init_scale=64.0), "policy"), []
    parameter = nn.Parameter(torch.ones(2))
    probe = make_probe(1, torch.device("cpu"))
    graph = ScaledGraph(
        lambda _, scale, __: (seen.append(float(scale)),), {0: "p"}, (torch.ones(()), probe), lambda: (runtime, None)
    )
    graph(parameter)
    yes = torch.tensor(True)
    runtime.judged(("p",), torch.tensor([True]), yes, yes)
    graph(parameter)
    assert seen == [64.0, 32.0]


# What is left when a model is gone.


def test_nothing_is_left_of_a_model_that_is_gone(graphs: list[ScaledGraph]) -> None:
    gc.collect()
    before = len(watching._watched)
    model = Net()
    compiled, optimizer = scaled(model), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for factor in (1.0, HUGE):
        (compiled(batch()).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(watching._watched) == before + 4
    references = [weakref.ref(value) for value in (model, *model.parameters())]
    (graph,) = graphs
    flags = [weakref.ref(value) for value in graph._flags.values()]
    assert len(flags) == 1
    del model, compiled, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 5
    assert len(watching._watched) == before
    assert graph._flags == {}
    assert flags[0]() is None


def test_what_a_graph_knows_of_one_model_outlives_another(graphs: list[ScaledGraph]) -> None:
    kept, gone = Net(), Net()
    for model in (kept, gone):
        scaled(model)(batch()).square().mean().backward()
    (graph,) = graphs
    assert len(graph._flags) == 2
    del model, gone
    gc.collect()
    assert len(graph._flags) == 1
    (scaled(kept)(batch()).square().mean() * HUGE).backward()
    assert "up.weight" in overflowed(kept)


def test_inputs_that_need_gradients_are_forgotten_after_their_step() -> None:
    model = Net()
    compiled = scaled(model)
    compiled(batch(requires_grad=True)).sum().backward()
    gc.collect()
    before = len(watching._watched)
    for _ in range(5):
        compiled(batch(requires_grad=True)).sum().backward()
    gc.collect()
    assert len(watching._watched) == before


def test_models_made_one_after_the_other_leave_one_graph_without_their_flags(graphs: list[ScaledGraph]) -> None:
    gc.collect()
    before = len(watching._watched)
    for _ in range(4):
        model = Net()
        (scaled(model)(batch()).square().mean() * HUGE).backward()
        del model
    gc.collect()
    assert len(watching._watched) == before
    assert [len(graph._flags) for graph in graphs] == [0] * len(graphs)
