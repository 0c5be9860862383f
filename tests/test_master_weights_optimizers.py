"""Masters under optimizers of the user's own: with state of any kind, wrapped, or with groups added later."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

import mpcompile
from mpcompile import MixprecError
from mpcompile.execution.stand_in import parameters_of
from tests.master_weights_tools import (
    BF16,
    Net,
    assert_all_moved,
    assert_follow,
    assert_same,
    backward,
    fp32_twin,
    masters_of,
    train,
    train_both,
    values,
)


class Counting(Optimizer):
    """SGD that counts in attributes, groups and state, and whose learning rate falls by itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})
        self.steps = 0
        self.history: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.history = [*self.history, self.steps]
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            group["lr"] = group["lr"] / 2
            for parameter in group["params"]:
                state = self.state[parameter]
                state["norm"] = state.get("norm", 0) + parameter.grad.norm()
                parameter -= group["lr"] * parameter.grad


class Inherited(Counting):
    """Steps through its base class, whose step torch's hooks see a second time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["outer"] = group.get("outer", 0) + 1


@pytest.mark.parametrize("make", [Counting, Inherited])
def test_what_a_step_assigns_to_groups_and_state_is_kept(make: Callable[..., Counting]) -> None:
    model = Net().bfloat16()
    optimizer = make(model.parameters())
    masters = mpcompile.master_weights(model, optimizer)
    parameters, twin = list(model.parameters()), fp32_twin(model.parameters())
    reference = make(twin)
    train_both(model, optimizer, reference, range(3))
    assert_follow(masters, parameters, twin)
    assert_same(optimizer.state_dict(), reference.state_dict())
    assert optimizer.param_groups[0]["taken"] == 3
    assert [id(parameter) for parameter in parameters_of(optimizer)] == [id(parameter) for parameter in parameters]


@pytest.mark.parametrize("make", [Counting, Inherited])
def test_what_a_step_assigns_to_attributes_is_kept(make: Callable[..., Counting]) -> None:
    model = Net().bfloat16()
    optimizer = make(model.parameters())
    mpcompile.master_weights(model, optimizer)
    names = set(optimizer.__dict__)
    train(model, optimizer, range(3))
    assert (optimizer.steps, optimizer.history) == (3, [1, 2, 3])
    # Nothing else of the step stays behind.
    assert set(optimizer.__dict__) == names


class Wrapping(Optimizer):
    """Has another optimizer do its steps."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(parameters_of(inner), {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


def test_the_masters_of_a_wrapped_optimizer_are_stepped() -> None:
    model = Net().bfloat16()
    inner, masters = masters_of(model, functools.partial(SGD, lr=0.5))
    before = values(masters.values())
    backward(model, BF16)
    Wrapping(inner).step()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert_same(list(masters.values()), [old - 0.5 * g for old, g in zip(before, gradients, strict=True)])


def test_steps_that_pass_by_the_masters_are_not_lost() -> None:
    # The inner optimizer, which steps, was not given masters: an error, or the parameters move all the same.
    model = Net().bfloat16()
    optimizer = Wrapping(SGD(model.parameters(), lr=0.5))
    mpcompile.master_weights(model, optimizer)
    before = values(model.parameters())
    backward(model, BF16)
    try:
        optimizer.step()
    except MixprecError:
        return
    assert_all_moved(model.parameters(), before)


def test_a_group_that_is_added_later_is_not_left_without_masters() -> None:
    # Weights near 1, updates of 1e-4: an error, or masters that move.
    model = Net().bfloat16()
    optimizer = SGD(model.body[0].parameters(), lr=1e-4)
    masters = mpcompile.master_weights(model, optimizer)
    optimizer.add_param_group({"params": list(model.body[2].parameters())})
    before = values(model.body[2].parameters())
    backward(model, BF16)
    try:
        optimizer.step()
    except MixprecError:
        return
    assert list(masters) == list(model.state_dict())
    assert_all_moved(list(masters.values())[2:], [value.float() for value in before])
