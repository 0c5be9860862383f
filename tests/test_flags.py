"""The overflow flags of one graph: raised by its backward, and found through the parameters they speak of."""

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from mpcompile.execution.flags import Flags
from mpcompile.execution.loss_scale import DynamicLossScale
from mpcompile.execution.runtime import Runtime
from mpcompile.execution.watch import watch

GENERATOR, DISCRIMINATOR = (0, 1), (2, 3)
"""Slots of the parameters that one optimizer steps, and of those that the other does."""
CPU = torch.device("cpu")
_numbers = itertools.count()
"""Of backwards, as autograd counts them."""


class Graph:
    """Flags of four parameters, as a compiled graph would have them, and the gradients that the graph left."""

    def __init__(self, count: int = 4) -> None:
        self.runtime = Runtime(DynamicLossScale(), "policy")
        self.parameters = [nn.Parameter(torch.zeros(2)) for _ in range(count)]
        self.flags = self.flags_of_another_graph()

    def flags_of_another_graph(self) -> Flags:
        """Flags of one more graph that reads the same parameters."""
        flags = Flags(self.runtime, CPU)
        for slot, parameter in enumerate(self.parameters):
            flags.belong_to(parameter, watch(parameter, f"p{slot}", self.runtime), slot)
        return flags

    def backward(self, *overflowed: int, flags: Flags | None = None, nodes: int = 1) -> None:
        """One backward, whose gradients in the slots ``overflowed`` are not finite.

        ``nodes``: how many calls of the graph it passes through; the first of them overflows.
        """
        number = next(_numbers)
        for node in range(nodes):
            found = torch.zeros(len(self.parameters))
            found[list(overflowed if node == 0 else ())] = 1
            (flags or self.flags).add(found, number)
        for parameter in self.parameters:  # autograd accumulates when all calls of the graph are behind it
            if parameter.grad is None:
                parameter.grad = torch.ones(2)
            else:
                parameter.grad += 1

    def zero_grad(self, slots: Sequence[int], set_to_none: bool = True) -> None:
        torch.optim.SGD([self.parameters[slot] for slot in slots]).zero_grad(set_to_none)

    def raised(self, *slots: int) -> list[bool]:
        found = self.flags.raised(slots)
        assert found.dtype is torch.bool
        return found.tolist()


def test_nothing_is_raised_before_a_backward() -> None:
    assert Graph().raised(0, 1, 2, 3) == [False] * 4


def test_flags_are_raised_in_the_slots_that_overflowed() -> None:
    graph = Graph()
    graph.backward(1, 3)
    assert graph.raised(0, 1, 2, 3) == [False, True, False, True]


def test_slots_are_answered_in_the_order_they_are_asked_for() -> None:
    graph = Graph()
    graph.backward(1)
    assert graph.raised(3, 1) == [False, True]
    assert graph.raised(1, 3) == [True, False]
    assert graph.raised(1) == [True]


def test_a_clean_backward_does_not_lower_the_flag_of_an_earlier_one() -> None:
    # Gradients are accumulated: the infinity of the first is in the sum.
    graph = Graph()
    graph.backward(0)
    graph.backward()
    graph.backward(2)
    assert graph.raised(0, 1, 2, 3) == [True, False, True, False]


def test_one_backward_through_several_calls_of_the_graph_keeps_the_flags_of_each() -> None:
    # No gradient is there when the second call is reached, although nothing was cleared.
    graph = Graph()
    graph.backward(0, nodes=3)
    assert graph.raised(0, 1, 2, 3) == [True, False, False, False]


def test_adding_keeps_nothing_of_the_given_tensor() -> None:
    # A CUDA graph writes its next flags into the same memory.
    graph, flags = Graph(), torch.tensor([1.0, 0.0, 0.0, 0.0])
    graph.flags.add(flags, next(_numbers))
    flags.fill_(1)
    assert graph.raised(0, 1, 2, 3) == [True, False, False, False]
    graph.backward(2)
    assert flags.tolist() == [1.0] * 4


def test_adding_does_not_write_into_the_tensor_of_an_earlier_backward() -> None:
    graph, first = Graph(), torch.zeros(4)
    graph.flags.add(first, next(_numbers))
    graph.flags.add(torch.ones(4), next(_numbers))
    assert first.tolist() == [0.0] * 4


def test_what_is_asked_for_stays_raised_until_it_is_consumed() -> None:
    graph = Graph()
    graph.backward(0)
    assert graph.raised(0) == graph.raised(0) == [True]


def test_flags_of_two_graphs_in_one_backward_both_count() -> None:
    graph = Graph()
    other, number = graph.flags_of_another_graph(), next(_numbers)
    graph.flags.add(torch.tensor([1.0, 0.0, 0.0, 0.0]), number)
    other.add(torch.tensor([0.0, 1.0, 0.0, 0.0]), number)
    assert graph.raised(0, 1) == [True, False]
    assert other.raised((0, 1)).tolist() == [False, True]


def test_parameters_that_nobody_steps_do_not_let_flags_pile_up() -> None:
    # A head is trained, and the rest of the model, which needs gradients too, keeps them for ever.
    graph, sizes = Graph(), []
    for _ in range(50):
        graph.backward()
        graph.flags.consume(GENERATOR)
        graph.zero_grad(GENERATOR)
        sizes.append(sum(len(held) for held in vars(graph.flags).values() if isinstance(held, (list, dict))))
    assert sizes[5:] == sizes[5:6] * 45


def test_a_slot_that_belongs_to_no_parameter_does_not_keep_flags_from_being_consumed() -> None:
    # The graph has an input that is differentiable and no parameter: nobody steps it.
    runtime = Runtime(DynamicLossScale(), "policy")
    flags, parameter = Flags(runtime, CPU), nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    flags.belong_to(parameter, watch(parameter, "p", runtime), 1)
    flags.add(torch.ones(2), next(_numbers))
    assert flags.raised([1]).tolist() == [True]
    flags.consume([1])
    assert flags.raised([1]).tolist() == [False]


def test_a_parameter_that_is_gone_does_not_keep_the_others_from_being_judged() -> None:
    graph = Graph()
    graph.backward(2, 3)
    del graph.parameters[3]
    graph.flags.consume(GENERATOR)
    assert graph.raised(2) == [True]


def test_flags_are_found_through_the_parameter_they_speak_of() -> None:
    graph = Graph(2)
    watched = watch(graph.parameters[1], "again", graph.runtime)
    assert [(flags, slot) for flags, slot in watched.flags()] == [(graph.flags, 1)]
    assert watched.name == "p1"


def test_a_parameter_of_two_graphs_has_a_flag_in_each() -> None:
    graph = Graph(2)
    other = Flags(graph.runtime, CPU)
    watched = watch(graph.parameters[1], "p1", graph.runtime)
    other.belong_to(graph.parameters[1], watched, 2)
    assert [(flags, slot) for flags, slot in watched.flags()] == [(graph.flags, 1), (other, 2)]
    assert watched.runtimes == [graph.runtime]


def test_the_flags_of_a_graph_that_is_gone_are_forgotten() -> None:
    graph = Graph(2)
    watched = watch(graph.parameters[1], "p1", graph.runtime)
    for _ in range(5):
        Flags(graph.runtime, CPU).belong_to(graph.parameters[1], watched, 1)
    assert [(flags, slot) for flags, slot in watched.flags()] == [(graph.flags, 1)]
    assert len(watched._places) <= 2  # the last one is forgotten when the next comes
