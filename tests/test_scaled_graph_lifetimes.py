"""Nothing is left of the flags of a scaled graph when the model they speak of is gone."""

import gc
import weakref

import pytest
import torch

from mpcompile.execution import watch as watching
from mpcompile.execution.scaled_graph import ScaledGraph
from tests.scaled_graph_tools import HUGE, Net, batch, overflowed, record_graphs, scaled

graphs = pytest.fixture(record_graphs)


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
    flags = [weakref.ref(value.flags) for value in graph._collectors.values()]
    assert len(flags) == 1
    del model, compiled, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 5
    assert len(watching._watched) == before
    assert graph._collectors == {}
    assert flags[0]() is None


def test_what_a_graph_knows_of_one_model_outlives_another(graphs: list[ScaledGraph]) -> None:
    kept, gone = Net(), Net()
    for model in (kept, gone):
        scaled(model)(batch()).square().mean().backward()
    (graph,) = graphs
    assert len(graph._collectors) == 2
    del model, gone
    gc.collect()
    assert len(graph._collectors) == 1
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
    assert [len(graph._collectors) for graph in graphs] == [0] * len(graphs)
