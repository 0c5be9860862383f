"""Closures and an enabled GradScaler are refused before anything is changed, and only for models that are scaled."""

import pytest
import torch
from torch import Tensor

from mpcompile import MixprecError
from tests.optimizer_step_tools import HUGE, OPTIMIZERS, SCALE, everything, training


def test_a_closure_is_refused_before_it_is_called() -> None:
    t = training()
    t.step()
    before, called = everything(t.optimizer), []
    for arguments, named in ((lambda: called.append(1),), {}), ((), {"closure": lambda: called.append(1)}):
        with pytest.raises(MixprecError, match="closure"):
            t.optimizer.step(*arguments, **named)
    assert (everything(t.optimizer), called) == (before, [])


def test_a_closure_of_none_is_none() -> None:
    t = training()
    before = everything(t.optimizer)
    t.backward()
    t.optimizer.step(None)
    t.optimizer.step(closure=None)
    assert everything(t.optimizer) != before
    assert t.runtime.skipped_steps == 0


def test_a_closure_of_an_optimizer_of_another_model_is_called() -> None:
    t = training()
    t.step()
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 1.0
    assert weight.tolist() == [0.0]


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_an_enabled_grad_scaler_is_refused(name: str) -> None:
    # A fused optimizer is stepped by another function of the GradScaler.
    t = training(OPTIMIZERS[name])
    t.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    t.optimizer.zero_grad()
    scaler.scale(t.compiled(torch.ones(1, 3)).mean()).backward()
    before = everything(t.optimizer)
    with pytest.raises(MixprecError, match=r"GradScaler.*'external'"):
        scaler.step(t.optimizer)
    assert everything(t.optimizer) == before


def test_a_disabled_grad_scaler_changes_nothing() -> None:
    t, plain = training(), training()
    plain.model.load_state_dict(t.model.state_dict())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for factor in (1.0, HUGE, 1.0):
        t.optimizer.zero_grad()
        t.backward(factor)
        scaler.step(t.optimizer)
        scaler.update()
        plain.step(factor)
    assert everything(t.optimizer) == everything(plain.optimizer)
    assert t.runtime.skipped_steps == 1


def test_a_grad_scaler_of_another_model_steps_it() -> None:
    t = training()
    t.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [0.5, 0.5]


def test_a_grad_scaler_steps_a_model_whose_scaling_is_left_to_it() -> None:
    t = training(loss_scale="external")
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    before = everything(t.optimizer)
    scaler.scale(t.compiled(torch.ones(1, 3)).square().mean()).backward()
    scaler.step(t.optimizer)
    scaler.update()
    assert everything(t.optimizer) != before
    assert (t.runtime.scale, scaler.get_scale()) == (1.0, SCALE)


def test_a_refused_step_can_be_taken_without_what_was_refused() -> None:
    t, twin = training(), training()
    twin.model.load_state_dict(t.model.state_dict())
    t.backward()
    twin.backward()
    with pytest.raises(MixprecError):
        t.optimizer.step(lambda: 0.0)
    t.optimizer.step()
    twin.optimizer.step()
    assert everything(t.optimizer) == everything(twin.optimizer)
    assert t.runtime.state_dict() == twin.runtime.state_dict()
