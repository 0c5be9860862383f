"""Masters of fp16 parameters: tiny gradients are not flushed, and a step that overflows changes nothing."""

import copy

import pytest
import torch
from torch import Tensor, nn

import mpcompile
from mpcompile import MixprecWarning
from tests.helpers import relative_error
from tests.master_weights_tools import (
    FP16,
    FP32,
    NO_MASTERS,
    OPTIMIZERS,
    assert_all_moved,
    assert_same,
    batch,
    everything,
    masters_of,
)
from tests.test_programs import mixprec


class Loss(nn.Module):
    """A model that computes its own loss, so that gradients of any size begin inside the graph."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.factor = factor

    def forward(self, x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        y = self.body(x)
        return (y if y.dtype is torch.float64 else y.float()).square().mean() * self.factor * weight


def tiny_loss(dtype: torch.dtype) -> Loss:
    """Its gradients are about 1e-9 in size: fp16 holds nothing below 3e-8."""
    return Loss(factor=1e-8).to(dtype)


def assert_nothing_flushed(model: nn.Module, twin: nn.Module) -> None:
    for parameter, truth in zip(model.parameters(), twin.parameters(), strict=True):
        assert parameter.grad.dtype is FP32
        assert 1e-10 < float(truth.grad.abs().amax()) < 1e-8
        assert int(parameter.grad.count_nonzero()) == parameter.numel()
        # Four fp16 roundings, each of 2^-11, on the way to the first layer's; twice that for the roundings of x and y.
        assert relative_error(parameter.grad, truth.grad) < 4 * 2.0**-10


def test_gradients_below_fp16_leave_the_graph_in_fp32() -> None:
    model = tiny_loss(FP16)
    twin = copy.deepcopy(model).double()
    masters_of(model)
    # 2^24 lifts 1e-9 to the middle of fp16's range.
    mixprec(model, dtype="fp16", loss_scale=2.0**24)(batch(FP16)).backward()
    twin(batch(FP16).double()).backward()
    assert_nothing_flushed(model, twin)


def test_without_masters_such_gradients_are_zero() -> None:
    model = tiny_loss(FP16)
    with pytest.warns(MixprecWarning, match=NO_MASTERS):
        mixprec(model, dtype="fp16", loss_scale=2.0**24)(batch(FP16)).backward()
    assert not any(bool(parameter.grad.any()) for parameter in model.parameters())


def test_a_graph_compiled_for_a_model_without_masters_flushes_nothing_of_one_with_them() -> None:
    plain, model = tiny_loss(FP16), tiny_loss(FP16)
    twin = copy.deepcopy(model).double()
    with pytest.warns(MixprecWarning, match=NO_MASTERS):
        mixprec(plain, dtype="fp16", loss_scale=2.0**24)(batch(FP16)).backward()
    masters_of(model)
    # Dynamo runs the code it compiled for the other model, which is of the same structure.
    mixprec(model, dtype="fp16", loss_scale=2.0**24)(batch(FP16)).backward()
    twin(batch(FP16).double()).backward()
    assert_nothing_flushed(model, twin)


def test_a_graph_compiled_before_the_masters_were_made_flushes_nothing() -> None:
    model = tiny_loss(FP16)
    twin = copy.deepcopy(model).double()
    compiled = mixprec(model, dtype="fp16", loss_scale=2.0**24)
    with pytest.warns(MixprecWarning, match=NO_MASTERS):
        compiled(batch(FP16))
    masters_of(model)
    compiled(batch(FP16)).backward()
    twin(batch(FP16).double()).backward()
    assert_nothing_flushed(model, twin)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW fused"])
def test_a_step_that_overflows_changes_nothing(name: str) -> None:
    model = Loss().half()
    optimizer, _ = masters_of(model, OPTIMIZERS[name])
    compiled = mixprec(model, dtype="fp16")
    runtime = mpcompile.runtime(compiled)
    one = torch.tensor(1.0)

    def step(weight: Tensor) -> bool:
        optimizer.zero_grad()
        compiled(batch(FP16), weight).backward()
        optimizer.step()
        return runtime.last_step_skipped

    assert not step(one)
    before = everything(model, optimizer)
    assert step(one * 1e6)  # times the loss scale of 2^16, far beyond fp16
    assert_same(everything(model, optimizer), before)
    assert (runtime.skipped_steps, runtime.scale) == (1, 2.0**15)
    assert not step(one)
    assert_all_moved(model.state_dict().values(), before[1].values())
