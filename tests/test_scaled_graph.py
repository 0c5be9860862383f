"""A compiled graph is called with the present loss scale, for the flags of the model that it is run for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpcompile.execution import watch as watching
from mpcompile.execution.loss_scale import DynamicLossScale
from mpcompile.execution.runtime import Runtime
from mpcompile.execution.scaled_graph import ScaledGraph, make_probe
from tests.helpers import relative_error
from tests.scaled_graph_tools import BOUND, HUGE, Net, assert_same, batch, gradients, overflowed, record_graphs, scaled
from tests.test_programs import in_fp64

graphs = pytest.fixture(record_graphs)


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
    assert graph._collectors == {}


# Whose flags.


def test_models_that_share_a_graph_have_flags_of_their_own(graphs: list[ScaledGraph]) -> None:
    first, second = Net(), Net()
    losses = [scaled(model)(batch()).square().mean() for model in (first, second)]
    (losses[0] + losses[1] * HUGE).backward()
    assert len(graphs) == 1
    assert len(graphs[0]._collectors) == 2
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
