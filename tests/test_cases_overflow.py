"""Values beyond fp16: the steps that are skipped and those that are not, the scale's way, and the warning's advice."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mpcompile
from tests.test_cases_loss_scaling import (
    ALL,
    Net,
    assert_close,
    assert_equal,
    backward,
    copies,
    gradients,
    train_step,
    train_steps,
)
from tests.test_programs import error, in_fp64
from tests.test_programs_fp16 import fp16


def test_overflow_of_a_micro_batch_is_not_hidden_by_clipping() -> None:
    model, x = Net(), torch.randn(4, 8)
    compiled = fp16(model)
    optimizer, runtime, before = torch.optim.AdamW(model.parameters()), mpcompile.runtime(compiled), copies(model)
    backward(compiled, x, 1e9)
    backward(compiled, x)
    for gradient in (parameter.grad for parameter in model.parameters()):
        gradient.nan_to_num_(0, 0, 0).clamp_(-1, 1)
    optimizer.step()
    assert (runtime.last_step_skipped, runtime.skipped_steps, runtime.scale) == (True, 1, 2.0**15)
    assert runtime.overflowed[:3] == ALL[:3]
    assert_equal(copies(model), before)
    assert not optimizer.state
    train_step(compiled, optimizer, x)  # what was judged once is not judged again
    assert (runtime.last_step_skipped, runtime.skipped_steps, runtime.overflowed) == (False, 1, ())


def test_gradients_thrown_away_do_not_skip_the_next_step() -> None:
    # A loop that sees a bad loss, clears the gradients and goes on with the next batch.
    model, x = Net(), torch.randn(4, 8)
    compiled = fp16(model)
    optimizer, runtime = torch.optim.SGD(model.parameters(), lr=0.1), mpcompile.runtime(compiled)
    exact = in_fp64(model)
    backward(compiled, x, 1e9)
    train_step(compiled, optimizer, x)  # starts with zero_grad()
    assert not runtime.last_step_skipped
    train_step(exact, torch.optim.SGD(exact.parameters(), lr=0.1), x.double())
    assert_close(copies(model), copies(exact))


def test_scale_stays_between_floor_and_cap() -> None:
    model, x = Net(), torch.randn(4, 8)
    compiled = fp16(model, {"init_scale": 2.0**22, "growth_interval": 1})
    optimizer, runtime = torch.optim.SGD(model.parameters(), lr=1e-3), mpcompile.runtime(compiled)
    assert train_steps(compiled, optimizer, x, 4, 1e-6) == [2.0**23, 2.0**24, 2.0**24, 2.0**24]
    runtime.skips_before_warning = 1000
    with pytest.warns(mpcompile.MixprecWarning, match="loss scale at its floor of 1"):
        fallen = train_steps(compiled, optimizer, x, 30, math.inf)
    assert fallen == [2.0 ** max(0, 23 - step) for step in range(30)]
    train_step(compiled, optimizer, x, 1e-6)
    assert (runtime.last_step_skipped, runtime.scale) == (False, 2.0)


@pytest.mark.parametrize("before", [True, False], ids=["made first", "made after compiling"])
def test_scheduler_does_not_warn_when_the_first_step_is_skipped(before: bool) -> None:
    model, x = Net(), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if before else None
    compiled = fp16(model)
    backward(compiled, x, 1e9)
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()  # a warning would be an error here
    assert mpcompile.runtime(compiled).last_step_skipped
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]
    start, exact = copies(model), in_fp64(model)
    train_step(compiled, optimizer, x)
    train_step(exact, torch.optim.AdamW(exact.parameters(), lr=0.01), x.double())
    moved = [after - old for after, old in zip(copies(model), start, strict=True)]
    truth = [after - old for after, old in zip(copies(exact), start, strict=True)]
    assert error(moved, truth) < 0.02  # AdamW divides by what the gradients are


class Island(nn.Module):
    """A region that asks for fp32; its weights are the largest that fp16 holds."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.factor = factor
        nn.init.constant_(self.inner.weight, 6e4)
        with torch.no_grad():
            self.inner.weight.mul_(torch.randn(8, 8).sign())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.inner(x * self.factor)
        return self.last(torch.tanh(x / 6e4 / self.factor))


def island_gradients(factor: float) -> tuple[Any, list[Tensor], list[Tensor]]:
    model, x = Island(factor), torch.randn(4, 8)
    compiled, exact = fp16(model, 2.0**12), in_fp64(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    compiled(x).sum().backward()
    exact(x.double()).sum().backward()
    optimizer.step()
    return mpcompile.runtime(compiled), gradients(model), gradients(exact)


def test_region_in_fp32_has_the_range_of_fp32() -> None:
    # Within the region the scaled gradient is about 2^12 * 6e4 / 6e4 / 2^-20, in front of it and behind it about 2^12.
    runtime, found, truth = island_gradients(2.0**-20)
    assert not runtime.last_step_skipped
    assert_close(found, truth)


class Steep(nn.Module):
    """Its first layer has a gradient 1e5 times as large as what leaves an fp32 region."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.inner(x * 1e5)


def test_overflow_in_front_of_a_region_is_real_and_not_the_region_s() -> None:
    model, x = Steep(), torch.randn(4, 8)
    compiled, exact = fp16(model, 2.0**12), in_fp64(model)
    compiled(x).sum().backward()
    exact(x.double()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    # The bias of the first layer is summed in fp32, and the region is in fp32: their gradients are finite, and right.
    assert mpcompile.runtime(compiled).overflowed == ("first.weight",)
    assert_close(gradients(model)[1:], gradients(exact)[1:])


def huge_model() -> Net:
    """Every value that fp16 cannot hold comes from a product of values that it can."""
    model = Net()
    nn.init.constant_(model.first.weight, 6e4)
    return model


def test_overflow_in_forward_skips_every_step_and_is_named_in_a_warning() -> None:
    model, x = huge_model(), torch.ones(4, 8)
    compiled = fp16(model)
    optimizer, runtime, before = torch.optim.AdamW(model.parameters()), mpcompile.runtime(compiled), copies(model)
    train_steps(compiled, optimizer, x, 15)
    with pytest.warns(mpcompile.MixprecWarning) as caught:
        train_steps(compiled, optimizer, x, 9)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2  # once each, not at every step
    assert "floor of 1." in messages[0]
    assert "20 optimizer steps in a row were skipped" in messages[1]
    assert all("first.weight" in message and "options={'fp32': [...]}" in message for message in messages)
    assert (runtime.skipped_steps, runtime.scale) == (24, 1.0)
    assert_equal(copies(model), before)


def test_strict_makes_the_warning_an_error() -> None:
    model, x = huge_model(), torch.ones(4, 8)
    compiled = fp16(model, strict=True)
    mpcompile.runtime(compiled).skips_before_warning = 2
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(compiled, optimizer, x)
    with pytest.raises(mpcompile.MixprecError, match=r"2 optimizer steps in a row.*first\.weight"):
        train_step(compiled, optimizer, x)


def test_what_the_warning_advises_helps() -> None:
    model, x = huge_model(), torch.ones(4, 8)
    exact = in_fp64(model)
    # What comes out of the first layer is beyond fp16, so the layer that reads it is kept in fp32 as well.
    compiled = fp16(model, 2.0**4, fp32=["first", "last"])
    compiled(x).sum().backward()
    exact(x.double()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not mpcompile.runtime(compiled).last_step_skipped
    assert_close(gradients(model), gradients(exact), 1e-5)


def test_each_of_two_optimizers_is_judged_for_itself() -> None:
    model, x = Steep(), torch.randn(4, 8)  # the first layer's weight overflows, the other does not
    compiled = fp16(model, {"init_scale": 2.0**12})
    runtime, before = mpcompile.runtime(compiled), copies(model)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.first, model.inner)]
    compiled(x).sum().backward()
    skipped = []
    for optimizer in optimizers:
        optimizer.step()
        skipped.append((runtime.last_step_skipped, runtime.overflowed, runtime.scale))
    assert skipped == [(True, ("first.weight",), 2.0**11), (False, (), 2.0**11)]
    moved = [not torch.equal(*pair) for pair in zip(before, copies(model), strict=True)]
    assert moved == [False, False, True, True]


def play(models: list[Any], modules: list[nn.Module], noise: Tensor, left_out: int | None = None) -> None:
    """Train a generator against a critic; in the second of four rounds the loss of the generator overflows.

    That loss leaves gradients on the critic, too, which are cleared. ``left_out``: a step of the generator's to skip.
    """
    generator, critic = (torch.optim.SGD(module.parameters(), lr=0.05) for module in modules)
    for i in range(4):
        generator.zero_grad()
        (models[1](models[0](noise)).mean() * (1e9 if i == 1 else 1.0)).backward()
        if i != left_out:
            generator.step()
        critic.zero_grad()
        models[1](models[0](noise).detach()).square().mean().backward()
        critic.step()


def test_generator_and_critic() -> None:
    modules, noise = (
        [nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 4), nn.Tanh())],
        torch.randn(4, 8),
    )
    exact, start = [in_fp64(module) for module in modules], [copies(module) for module in modules]
    models = [fp16(module, {"init_scale": 2.0**10}) for module in modules]
    play(models, modules, noise)
    # Only the generator's second step is left out: the critic's gradients of that loss were cleared.
    play(exact, exact, noise.double(), left_out=1)
    assert [mpcompile.runtime(model).skipped_steps for model in models] == [1, 0]
    for module, truth, before in zip(modules, exact, start, strict=True):
        moved = [after - old for after, old in zip(copies(module), before, strict=True)]
        right = [after - old for after, old in zip(copies(truth), before, strict=True)]
        assert error(moved, right) < 0.02


def test_moving_average_does_not_see_skipped_steps() -> None:
    model, x = Net(), torch.randn(4, 8)
    exact = in_fp64(model)
    compiled = fp16(model)
    averages = [AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for net in (model, exact)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, exact)]
    for factor in (1.0, 1e9, 1.0):
        train_step(compiled, optimizers[0], x, factor)
        averages[0].update_parameters(model)
        if factor == 1.0:
            train_step(exact, optimizers[1], x.double())
        averages[1].update_parameters(exact)
    assert mpcompile.runtime(compiled).skipped_steps == 1
    assert_close(copies(averages[0].module), copies(averages[1].module))
    assert all(bool(parameter.isfinite().all()) for parameter in averages[0].parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_batch_that_is_not_finite_costs_one_step(bad: float) -> None:
    model, x = Net(), torch.randn(4, 8)
    compiled = fp16(model)
    optimizer, runtime, before = torch.optim.AdamW(model.parameters()), mpcompile.runtime(compiled), copies(model)
    spoiled = x.clone()
    spoiled[1, 2] = bad
    train_step(compiled, optimizer, spoiled)
    assert (runtime.last_step_skipped, runtime.overflowed) == (True, ALL)
    assert_equal(copies(model), before)
    train_step(compiled, optimizer, x)
    assert (runtime.last_step_skipped, runtime.skipped_steps, runtime.scale) == (False, 1, 2.0**15)
