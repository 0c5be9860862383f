"""The hooks on optimizers are installed once, judge a step once, and leave alone what is not scaled."""

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from mpcompile.execution import optimizer_step
from mpcompile.execution.stand_in import is_stand_in
from tests.optimizer_step_tools import (
    HUGE,
    OPTIMIZERS,
    SCALE,
    CallsSuper,
    Net,
    copy_gradients,
    everything,
    infinity_in_one_gradient,
    training,
)

# What is left alone.


Without = Callable[[Callable[[], Any]], None]


@pytest.fixture
def without_hooks(monkeypatch: pytest.MonkeyPatch) -> Without:
    """Call a function as it would run had mixprec installed no hooks."""

    def call(function: Callable[[], Any]) -> None:
        with monkeypatch.context() as patch:
            for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
                patch.setattr(torch_optimizer, name, collections.OrderedDict())
            function()

    return call


def test_an_optimizer_of_an_uncompiled_model_steps_whatever_its_gradients(without_hooks: Without) -> None:
    optimizer_step.install()
    for name, make in OPTIMIZERS.items():
        models = [Net(), Net()]
        models[1].load_state_dict(models[0].state_dict())
        mine, plain = (make(model.parameters()) for model in models)
        for value in (1.0, float("inf")):
            for parameter in (*models[0].parameters(), *models[1].parameters()):
                parameter.grad = torch.full_like(parameter, value)
            mine.step()
            without_hooks(plain.step)
            assert everything(mine) == everything(plain), name


@pytest.mark.parametrize("options", [{"dtype": "bf16", "loss_scale": "auto"}, {"loss_scale": None}])
def test_an_optimizer_of_a_model_that_is_not_scaled_steps_whatever_its_gradients(
    options: dict[str, Any], without_hooks: Without
) -> None:
    optimizer_step.install()
    t = training(**options)
    plain = OPTIMIZERS["sgd"](copy.deepcopy(t.model).parameters())
    infinity_in_one_gradient(t)
    copy_gradients(t, plain)
    t.optimizer.step()
    without_hooks(plain.step)
    assert everything(t.optimizer) == everything(plain)
    assert (t.runtime.scale, t.runtime.skipped_steps, t.runtime.last_step_skipped) == (1.0, 0, False)


def test_parameters_of_the_same_optimizer_that_no_graph_reads_are_skipped_too_but_not_judged() -> None:
    model = Net()
    eager = nn.Parameter(torch.ones(2))
    t = training(lambda p: torch.optim.SGD([*p, eager], 0.1), model)
    eager.grad = torch.ones(2)
    t.backward(HUGE)
    t.optimizer.step()
    assert eager.tolist() == [1.0, 1.0]
    t.optimizer.zero_grad()
    t.backward()
    eager.grad = torch.tensor([float("inf"), 1.0])
    t.optimizer.step()
    assert eager.tolist() == [-float("inf"), pytest.approx(0.9)]


# Subclasses that call the step of their base class.


class CallsSuperTwice(CallsSuper):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


@pytest.mark.parametrize("kind", [CallsSuper, CallsSuperTwice])
def test_a_subclass_that_calls_super_is_judged_once(kind: type[Optimizer]) -> None:
    torch.optim.AdamW([torch.ones(1)]), CallsSuper([torch.ones(1)])  # their own steps are hooked by now
    t = training(lambda p: kind(p, lr=0.1), loss_scale={"init_scale": SCALE, "growth_interval": 2})
    t.step()
    before = everything(t.optimizer)
    t.step(HUGE)
    assert everything(t.optimizer) == before
    assert (t.runtime.scale, t.runtime.skipped_steps) == (SCALE / 2, 1)
    t.step()
    assert t.runtime.scale == SCALE / 2
    t.step()
    assert t.runtime.scale == SCALE


def test_a_subclass_that_calls_super_steps_like_it_does_alone(
    without_hooks: Without,
) -> None:
    torch.optim.AdamW([torch.ones(1)])
    t = training(CallsSuper)
    alone = CallsSuper(copy.deepcopy(t.model).parameters())
    t.backward()
    copy_gradients(t, alone)
    t.optimizer.step()
    without_hooks(alone.step)
    assert everything(t.optimizer) == everything(alone)


# Hooks and errors.


def test_the_hooks_are_installed_once() -> None:
    for width in (4, 5):
        training(model=Net(width)).step()
    optimizer_step.install()
    hooks = list(torch_optimizer._global_optimizer_pre_hooks.values())
    assert hooks.count(optimizer_step._before_step) == 1
    assert not any("mpcompile" in getattr(h, "__module__", "") for h in hooks if h is not optimizer_step._before_step)


class Fails(torch.optim.SGD):
    """Raises in its step when told to."""

    failing = False

    def step(self, closure: Any = None) -> Any:
        if self.failing:
            raise ZeroDivisionError
        return super().step(closure)


@pytest.mark.parametrize("factor", [1.0, HUGE], ids=["clean", "skipped"])
def test_an_error_in_a_step_leaves_nothing_behind(factor: float) -> None:
    t, twin = training(lambda p: Fails(p, lr=0.1, momentum=0.9)), training(lambda p: Fails(p, lr=0.1, momentum=0.9))
    twin.model.load_state_dict(t.model.state_dict())
    before = set(t.optimizer.__dict__)
    Fails.failing = True
    try:
        with pytest.raises(ZeroDivisionError):
            t.step(factor)
    finally:
        Fails.failing = False
    assert set(t.optimizer.__dict__) == before
    assert not is_stand_in(t.optimizer)
    for run in (t, twin):
        run.step()
        run.step(HUGE)
        run.step()
    assert everything(t.optimizer) == everything(twin.optimizer)
