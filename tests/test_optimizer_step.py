"""An optimizer step whose gradients overflowed is left out as if it had not been called, and no other step is."""

import collections
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

import mpcompile
from mpcompile import MixprecError, Runtime
from mpcompile.execution import optimizer_step
from mpcompile.execution.stand_in import is_stand_in
from mpcompile.execution.watch import watched_among
from tests.test_programs import mixprec

SCALE = 1024.0
HUGE = 1e30
"""A factor on the loss with which gradients are finite in fp32 and infinite in fp16."""

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
}


class Net(nn.Module):
    """Two matmuls, so that a gradient passes through fp16 on its way to the first."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(3, width)
        self.down = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@dataclass
class Training:
    """A compiled model in training."""

    model: nn.Module
    compiled: Any
    optimizer: Optimizer
    runtime: Runtime

    def backward(self, factor: float = 1.0, seed: int = 0) -> None:
        """Backward of one batch."""
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        (self.compiled(x).square().mean() * factor).backward()

    def step(self, factor: float = 1.0, seed: int = 0) -> None:
        """One whole step of the ordinary loop."""
        self.optimizer.zero_grad()
        self.backward(factor, seed)
        self.optimizer.step()

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def training(
    make: Callable[[Any], Optimizer] = OPTIMIZERS["sgd"], model: nn.Module | None = None, **options: Any
) -> Training:
    model = Net() if model is None else model
    compiled = mixprec(model, **{"dtype": "fp16", "loss_scale": {"init_scale": SCALE}, **options})
    return Training(model, compiled, make(model.parameters()), mpcompile.runtime(compiled))


def bits(value: Any) -> Any:
    """The value, where it is a tensor with its dtype, shape and every bit."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    return value


def everything(optimizer: Optimizer) -> Any:
    """Every bit that a step may change: parameters, optimizer state, step counts, settings of the groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [{key: bits(value) for key, value in optimizer.state.get(p, {}).items()} for p in parameters]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return [bits(p) for p in parameters], state, len(optimizer.state), copy.deepcopy(groups)


def copy_gradients(t: Training, other: Optimizer) -> None:
    """Give the gradients of ``t`` to the parameters of an optimizer of a copy of its model."""
    for parameter, gradient in zip(other.param_groups[0]["params"], t.gradients, strict=True):
        parameter.grad = gradient.clone()


def loss_overflows(t: Training) -> None:
    t.backward(HUGE)
    assert not all(gradient.isfinite().all() for gradient in t.gradients)


def infinity_in_one_gradient(t: Training) -> None:
    t.backward()
    t.gradients[-1].view(-1)[0] = float("inf")


def nan_in_one_gradient(t: Training) -> None:
    t.backward()
    t.gradients[0].view(-1)[-1] = float("nan")


def minus_infinity_everywhere(t: Training) -> None:
    t.backward()
    for gradient in t.gradients:
        gradient.fill_(-float("inf"))


def hidden_by_nan_to_num(t: Training) -> None:
    t.backward(HUGE)
    for gradient in t.gradients:
        gradient.nan_to_num_(0.5, 0.5, 0.5)


def hidden_by_clipping(t: Training) -> None:
    t.backward(HUGE)
    nn.utils.clip_grad_value_(t.model.parameters(), 0.1)
    for gradient in t.gradients:
        gradient.nan_to_num_(0.1)  # infinity times the zero of a relu is NaN, which clipping leaves


def hidden_by_new_gradients(t: Training) -> None:
    t.backward(HUGE)
    for parameter in t.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def hidden_by_a_later_clean_backward(t: Training) -> None:
    hidden_by_nan_to_num(t)
    t.backward()


OVERFLOWS = [
    loss_overflows,
    infinity_in_one_gradient,
    nan_in_one_gradient,
    minus_infinity_everywhere,
    hidden_by_nan_to_num,
    hidden_by_clipping,
    hidden_by_new_gradients,
    hidden_by_a_later_clean_backward,
]


# The optimizers take turns within a test: their models have one structure, so that Dynamo compiles it once.


def test_a_skipped_step_changes_no_bit() -> None:
    for name, make in OPTIMIZERS.items():
        t = training(make)
        t.step(seed=1)
        t.step(seed=2)
        before = everything(t.optimizer)
        for count, overflow in enumerate(OVERFLOWS, 1):
            t.optimizer.zero_grad()
            overflow(t)
            t.optimizer.step()
            assert everything(t.optimizer) == before, (name, overflow)
            assert (t.runtime.skipped_steps, t.runtime.scale) == (count, SCALE / 2**count), (name, overflow)


def test_state_that_does_not_exist_yet_is_not_made_by_a_skipped_step() -> None:
    for name, make in OPTIMIZERS.items():
        t = training(make)
        before = everything(t.optimizer)
        assert (len(t.optimizer.state) > 0) == (name == "adagrad")  # Adagrad makes its state when it is made
        for overflow in OVERFLOWS:
            t.optimizer.zero_grad()
            overflow(t)
            t.optimizer.step()
            assert everything(t.optimizer) == before, (name, overflow)


def test_training_goes_on_as_if_the_skipped_steps_had_not_been() -> None:
    # Also bit by bit with another scale after them: S is a power of two.
    for name, make in OPTIMIZERS.items():
        undisturbed = training(make)
        disturbed = training(make, copy.deepcopy(undisturbed.model))
        for seed in range(4):
            undisturbed.step(seed=seed)
            if seed % 2 == 0:
                disturbed.step(HUGE, seed=7)
            disturbed.step(seed=seed)
        assert (undisturbed.runtime.skipped_steps, disturbed.runtime.skipped_steps) == (0, 2)
        assert everything(disturbed.optimizer) == everything(undisturbed.optimizer), name


def test_a_clean_step_is_that_of_the_optimizer_alone() -> None:
    for name, make in OPTIMIZERS.items():
        t = training(make)
        alone = make(copy.deepcopy(t.model).parameters())
        for seed in range(3):
            t.optimizer.zero_grad()
            t.backward(seed=seed)
            copy_gradients(t, alone)
            t.optimizer.step()
            alone.step()
            assert everything(t.optimizer) == everything(alone), name


def test_the_gradients_of_a_skipped_step_are_left_to_the_user() -> None:
    t = training()
    t.backward(HUGE)
    before = [bits(gradient) for gradient in t.gradients]
    t.optimizer.step()
    assert [bits(gradient) for gradient in t.gradients] == before


def test_a_step_is_skipped_again_while_its_gradients_are_not_cleared() -> None:
    t = training()
    t.backward(HUGE)
    t.optimizer.step()
    t.backward()
    t.optimizer.step()
    assert t.runtime.skipped_steps == 2


def test_all_groups_are_skipped_for_an_overflow_in_one() -> None:
    model = Net()
    t = training(lambda _: torch.optim.SGD([{"params": [*m.parameters()]} for m in (model.up, model.down)], 0.1), model)
    t.backward()
    before = everything(t.optimizer)
    assert model.up.weight.grad is not None
    model.up.weight.grad.fill_(float("inf"))
    t.optimizer.step()
    assert everything(t.optimizer) == before
    assert t.runtime.overflowed == ("up.weight",)


def test_the_names_are_those_of_the_gradients_that_are_not_finite() -> None:
    t = training()
    t.backward()
    assert t.model.down.bias.grad is not None
    t.model.down.bias.grad[1] = float("nan")
    t.optimizer.step()
    assert t.runtime.overflowed == ("down.bias",)
    t.step()
    assert t.runtime.overflowed == ()


def test_a_step_hook_of_the_user_that_hides_the_overflow_comes_too_late() -> None:
    t = training()
    t.optimizer.register_step_pre_hook(lambda o, *_: [g.nan_to_num_(0, 0, 0) for g in t.gradients] and None)
    before = everything(t.optimizer)
    t.step(HUGE)
    assert everything(t.optimizer) == before


def test_gradients_set_by_autograd_grad_are_judged() -> None:
    t = training()
    before = everything(t.optimizer)
    loss = t.compiled(torch.ones(1, 3)).sum() * HUGE
    found = torch.autograd.grad(loss, list(t.model.parameters()))
    for parameter, gradient in zip(t.model.parameters(), found, strict=True):
        parameter.grad = gradient
    t.optimizer.step()
    assert (everything(t.optimizer), t.runtime.skipped_steps) == (before, 1)


def test_an_overflow_in_autograd_grad_is_not_lost_when_hidden() -> None:
    t = training()
    before = everything(t.optimizer)
    loss = t.compiled(torch.ones(1, 3)).sum() * HUGE
    found = torch.autograd.grad(loss, list(t.model.parameters()))
    for parameter, gradient in zip(t.model.parameters(), found, strict=True):
        parameter.grad = gradient.nan_to_num(0, 0, 0)
    t.optimizer.step()
    assert (everything(t.optimizer), t.runtime.skipped_steps) == (before, 1)
    assert "up.weight" in t.runtime.overflowed


def test_an_overflow_in_autograd_grad_of_some_parameters_is_not_lost_when_hidden() -> None:
    t = training()
    before = everything(t.optimizer)
    (found,) = torch.autograd.grad(t.compiled(torch.ones(1, 3)).sum() * HUGE, [t.model.up.weight])
    t.model.up.weight.grad = found.nan_to_num(0, 0, 0)
    t.optimizer.step()
    assert (everything(t.optimizer), t.runtime.overflowed) == (before, ("up.weight",))


def test_an_overflow_in_the_first_of_two_autograd_grads_is_not_lost_when_hidden() -> None:
    # Micro-batches whose gradients the loop adds up itself.
    t = training()
    before = everything(t.optimizer)
    parameters = list(t.model.parameters())
    found = [torch.autograd.grad(t.compiled(torch.ones(1, 3)).sum() * factor, parameters) for factor in (HUGE, 1.0)]
    for parameter, first, second in zip(parameters, *found, strict=True):
        parameter.grad = (first + second).nan_to_num(0, 0, 0)
    t.optimizer.step()
    assert (everything(t.optimizer), t.runtime.skipped_steps) == (before, 1)


# When the scale moves.


def test_the_scale_moves_once_for_a_step_of_several_backwards() -> None:
    t = training()
    for seed in range(3):
        t.backward(HUGE, seed)
    t.optimizer.step()
    assert (t.runtime.scale, t.runtime.skipped_steps) == (SCALE / 2, 1)


def test_backwards_without_a_step_move_nothing() -> None:
    t = training(loss_scale={"init_scale": SCALE, "growth_interval": 1})
    for factor in (1.0, HUGE, 1.0):
        t.backward(factor)
        assert (t.runtime.scale, t.runtime.skipped_steps) == (SCALE, 0)


def test_growth_counts_optimizer_steps_not_backwards() -> None:
    t = training(loss_scale={"init_scale": SCALE, "growth_interval": 3})
    seen = []
    for _ in range(4):
        t.optimizer.zero_grad()
        t.backward(seed=0)
        t.backward(seed=1)
        t.optimizer.step()
        seen.append(t.runtime.scale)
    assert seen == [SCALE, SCALE, 2 * SCALE, 2 * SCALE]


def test_one_optimizer_of_two_models_skips_both_and_lowers_the_scale_of_one() -> None:
    first, second = training(), training(model=Net(width=5), loss_scale={"init_scale": SCALE, "growth_interval": 2})
    optimizer = torch.optim.SGD([*first.model.parameters(), *second.model.parameters()], 0.1, momentum=0.9)
    first.backward()
    second.backward()
    optimizer.step()
    before = everything(optimizer)
    optimizer.zero_grad()
    first.backward(HUGE)
    second.backward()
    optimizer.step()
    assert everything(optimizer) == before
    assert [(t.runtime.scale, t.runtime.last_step_skipped) for t in (first, second)] == [(512.0, True), (1024.0, True)]
    assert (first.runtime.overflowed != (), second.runtime.overflowed) == (True, ())
    # The step skipped for the first is no clean step of the second, whose next one is its second.
    optimizer.zero_grad()
    first.backward()
    second.backward()
    optimizer.step()
    assert [t.runtime.scale for t in (first, second)] == [512.0, 2048.0]
    assert everything(optimizer) != before


def test_an_infinity_put_into_a_gradient_lowers_the_scale_of_its_own_model() -> None:
    first, second = training(), training(model=Net(width=5))
    optimizer = torch.optim.SGD([*first.model.parameters(), *second.model.parameters()], 0.1)
    first.backward()
    second.backward()
    second.gradients[0].fill_(float("inf"))
    optimizer.step()
    assert [t.runtime.scale for t in (first, second)] == [SCALE, SCALE / 2]
    assert [t.runtime.overflowed for t in (first, second)] == [(), ("up.weight",)]


def test_a_model_compiled_twice_blames_the_graph_that_overflowed() -> None:
    t = training()
    other = mixprec(t.model, dtype="fp16", loss_scale={"init_scale": 64.0})
    t.step()
    t.optimizer.zero_grad()
    (other(torch.ones(1, 3)).sum() * HUGE).backward()
    t.optimizer.step()
    assert (t.runtime.scale, mpcompile.runtime(other).scale) == (SCALE, 32.0)


# Two optimizers.


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(2, 3)

    def forward(self, noise: Tensor) -> Tensor:
        return torch.tanh(self.make(noise))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(x)


class Gan:
    """A generator and a discriminator, each with an optimizer; the generator's loss passes through both.

    ``one_graph``: compiled together for that loss, instead of one after the other.
    """

    def __init__(self, one_graph: bool) -> None:
        self.generator, self.discriminator = training(model=Generator()), training(model=Discriminator())
        model, judge = self.generator.model, self.discriminator.model
        self._fool = (
            mixprec(lambda z: judge(model(z)), dtype="fp16", loss_scale={"init_scale": SCALE})
            if one_graph
            else lambda z: self.discriminator.compiled(self.generator.compiled(z))
        )

    def run(self, script: str) -> tuple[bool, bool]:
        """Act as ``script`` says, and return whether generator and discriminator are changed.

        For generator and discriminator, ``G`` and ``D``: ``zero`` clears the gradients, ``loss`` runs backward,
        ``HUGE`` runs one that overflows, ``step`` steps.
        """
        optimizers = [self.generator.optimizer, self.discriminator.optimizer]
        before = list(map(everything, optimizers))
        for action in script.split():
            optimizer = optimizers["GD".index(action[0])]
            if action[1:] == "zero":
                optimizer.zero_grad()
            elif action[1:] == "step":
                optimizer.step()
            else:
                output = (
                    self._fool(torch.ones(4, 2)) if action[0] == "G" else self.discriminator.compiled(torch.ones(4, 3))
                )
                (output.square().mean() * {"loss": 1.0, "HUGE": HUGE}[action[1:]]).backward()
        after = list(map(everything, optimizers))
        return before[0] != after[0], before[1] != after[1]


in_one_graph_or_two = pytest.mark.parametrize("one_graph", [True, False], ids=["one graph", "two graphs"])


@in_one_graph_or_two
def test_gan_only_the_model_that_overflowed_is_skipped(one_graph: bool) -> None:
    gan = Gan(one_graph)
    assert gan.run("Gzero Gloss Gstep Dzero Dloss Dstep") == (True, True)
    assert gan.run("Gzero Gloss Gstep Dzero DHUGE Dstep") == (True, False)
    assert gan.run("Dzero DHUGE Dstep Gzero Gloss Gstep") == (True, False)
    assert gan.run("Dzero Gzero DHUGE Dstep Gloss Gstep") == (True, False)
    assert gan.run("Dzero Dloss Dstep Gzero GHUGE Gstep") == (False, True)
    # Without zero_grad the generator's infinity is in the discriminator's gradient.
    assert gan.run("Dstep Gzero Dzero") == (False, False)
    assert gan.run("Gzero Gloss Gstep Dzero Dloss Dstep") == (True, True)


@in_one_graph_or_two
def test_gan_what_the_generators_loss_left_in_the_discriminator_does_not_count_once_cleared(one_graph: bool) -> None:
    gan = Gan(one_graph)
    assert gan.run("Gzero GHUGE Gstep Dzero Dloss Dstep") == (False, True)
    assert gan.run("Gzero GHUGE Dzero Dloss Dstep Gstep") == (False, True)
    assert gan.run("Gzero GHUGE Dzero Gstep Dloss Dstep") == (False, True)
    assert gan.run("Gzero GHUGE Gstep Gzero Dzero Gloss Gstep Dzero Dloss Dstep") == (True, True)


@in_one_graph_or_two
def test_gan_it_counts_where_it_was_not_cleared_even_if_it_is_hidden(one_graph: bool) -> None:
    gan = Gan(one_graph)
    # The last one was cleared, but before the overflow.
    for script in ("GHUGE Gstep Dloss", "GHUGE Gstep Gzero Gloss", "Gzero Gloss Dzero Dloss GHUGE"):
        gan.run("Gzero Dzero")
        gan.run(script)
        for gradient in gan.discriminator.gradients:
            gradient.nan_to_num_(0, 0, 0)
        assert gan.run("Dstep") == (False, False), script


def test_gan_an_overflow_in_the_generator_alone_leaves_the_discriminator_to_step() -> None:
    gan = Gan(one_graph=False)
    made = gan.generator.compiled(torch.ones(4, 2))
    made.register_hook(lambda gradient: gradient * HUGE)
    gan.discriminator.compiled(made).square().mean().backward()
    assert gan.run("Gstep Dstep") == (False, True)
    assert [t.runtime.scale for t in (gan.generator, gan.discriminator)] == [SCALE / 2, SCALE]


def test_an_overflow_that_was_thrown_away_does_not_skip_the_next_step() -> None:
    t = training()
    t.backward(HUGE)
    t.optimizer.zero_grad()
    before = everything(t.optimizer)
    t.step()
    assert everything(t.optimizer) != before


# Learning-rate schedulers.


def test_a_scheduler_does_not_warn_when_the_first_step_is_skipped() -> None:
    # Warnings are errors here: torch warns if the optimizer's step was not called before the scheduler's.
    t = training()
    scheduler = torch.optim.lr_scheduler.StepLR(t.optimizer, 1, gamma=0.5)
    t.step(HUGE)
    scheduler.step()
    assert t.runtime.last_step_skipped
    assert t.optimizer.param_groups[0]["lr"] == 0.05


def test_a_scheduler_can_leave_out_the_skipped_steps() -> None:
    t = training()
    scheduler = torch.optim.lr_scheduler.StepLR(t.optimizer, 1, gamma=0.5)
    rates = []
    for factor in (HUGE, 1.0, HUGE, 1.0):
        t.step(factor)
        if not t.runtime.last_step_skipped:
            scheduler.step()
        rates.append(t.optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.05, 0.05, 0.025]


# What is refused.


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


# Optimizers of other shapes.


class CallsSuper(torch.optim.AdamW):
    """Does something of its own around the step of its base class."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)
        return result


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


class Prompted(nn.Module):
    """Reads a trained tensor that is an input and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(3, 2)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        return self.down(torch.sin(x + prompt))


def prompted() -> tuple[Training, Tensor]:
    prompt = torch.zeros(3, requires_grad=True)
    return training(lambda p: torch.optim.SGD([*p, prompt], 0.1, momentum=0.9), Prompted()), prompt


def test_a_leaf_input_is_stepped_with_the_parameters() -> None:
    t, prompt = prompted()
    t.compiled(torch.ones(1, 3), prompt).sum().backward()
    assert prompt.grad is not None
    expected = -0.1 * prompt.grad
    t.optimizer.step()
    assert torch.equal(prompt.detach(), expected)
    assert t.runtime.skipped_steps == 0


def test_a_leaf_input_that_overflows_skips_the_parameters() -> None:
    t, prompt = prompted()
    t.compiled(torch.ones(1, 3), prompt).sum().backward()
    before = everything(t.optimizer)
    assert prompt.grad is not None
    prompt.grad[0] = float("inf")
    t.optimizer.step()
    assert everything(t.optimizer) == before
    assert t.runtime.overflowed == ("l_prompt_",)


def test_a_leaf_input_is_skipped_with_the_parameters() -> None:
    t, prompt = prompted()
    (t.compiled(torch.ones(1, 3), prompt).sum() * HUGE).backward()
    for parameter in (*t.model.parameters(), prompt):
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(0, 0, 0)
    before = everything(t.optimizer)
    t.optimizer.step()
    assert everything(t.optimizer) == before


def test_an_optimizer_of_a_leaf_input_alone_is_judged() -> None:
    t, prompt = prompted()
    optimizer = torch.optim.SGD([prompt], 0.1)
    (t.compiled(torch.ones(1, 3), prompt).sum() * HUGE).backward()
    optimizer.step()
    assert prompt.tolist() == [0.0] * 3
    assert (t.runtime.scale, t.runtime.skipped_steps) == (SCALE / 2, 1)


def test_a_hidden_overflow_of_a_leaf_input_is_judged() -> None:
    t, prompt = prompted()
    optimizer = torch.optim.SGD([prompt], 0.1)
    (t.compiled(torch.ones(1, 3), prompt).sum() * HUGE).backward()
    assert prompt.grad is not None
    prompt.grad.nan_to_num_(1, 1, 1)
    optimizer.step()
    assert prompt.tolist() == [0.0] * 3


def two_prompts() -> tuple[Training, list[Tensor], list[Optimizer]]:
    t, _ = prompted()
    prompts = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    for prompt, factor in zip(prompts, (HUGE, 1.0), strict=True):
        (t.compiled(torch.ones(1, 3), prompt).sum() * factor).backward()
        assert prompt.grad is not None
        prompt.grad.nan_to_num_(1, 1, 1)
    return t, prompts, [torch.optim.SGD([prompt], 1.0) for prompt in prompts]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_leaf_inputs_of_one_model_the_one_that_overflowed_is_skipped(order: tuple[int, int]) -> None:
    _, prompts, optimizers = two_prompts()
    for index in order:
        optimizers[index].step()
    assert [bool(prompt.any()) for prompt in prompts] == [False, True]


def test_leaf_inputs_that_take_turns_do_not_let_anything_pile_up() -> None:
    t, prompts, optimizers = two_prompts()
    sizes = []
    for _ in range(10):
        for prompt, optimizer in zip(prompts, optimizers, strict=True):
            optimizer.zero_grad()
            t.compiled(torch.ones(1, 3), prompt).sum().backward()
            optimizer.step()
        sizes.append([len(list(watched.flags())) for _, watched in watched_among(prompts)])
    assert sizes[-1] == sizes[0]


def test_without_any_gradient_nothing_moves() -> None:
    t = training(loss_scale={"init_scale": SCALE, "growth_interval": 2})
    t.step()
    before = everything(t.optimizer)
    t.optimizer.zero_grad()
    t.optimizer.step()
    assert everything(t.optimizer) == before
    assert t.runtime.scale == SCALE  # growing now would mean that the empty step was counted
    t.step()
    assert t.runtime.scale == 2 * SCALE


def test_parameters_without_a_gradient_are_not_judged() -> None:
    t = training()
    t.backward()
    t.model.up.weight.grad = None
    before = bits(t.model.up.weight)
    t.optimizer.step()
    assert (bits(t.model.up.weight), t.runtime.skipped_steps) == (before, 0)


class WithEmpty(Net):
    """A parameter without elements, as the rest of a split may be."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.empty.sum(0)


def test_an_empty_parameter_is_finite() -> None:
    t = training(model=WithEmpty())
    t.step()
    assert t.model.empty.grad is not None
    assert t.runtime.skipped_steps == 0
    t.step(HUGE)
    assert t.runtime.skipped_steps == 1
    assert "empty" not in t.runtime.overflowed


def test_a_sparse_gradient_in_the_same_optimizer_is_skipped_and_stepped_with_the_others() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    model = Net()
    t = training(lambda p: torch.optim.SGD([*p, *embedding.parameters()], 0.1), model)

    def step(factor: float) -> None:
        t.optimizer.zero_grad()
        (t.compiled(embedding(torch.tensor([0, 2, 2]))).square().mean() * factor).backward()
        assert embedding.weight.grad is not None
        assert embedding.weight.grad.is_sparse
        t.optimizer.step()

    before = everything(t.optimizer)
    step(HUGE)
    assert everything(t.optimizer) == before
    step(1.0)
    changed = embedding.weight.detach() != torch.frombuffer(bytearray(before[0][-1][2]), dtype=torch.float32).view(5, 3)
    assert changed.any(1).tolist() == [True, False, True, False, False]


def test_a_sparse_gradient_is_judged_by_its_values() -> None:
    t = training(lambda p: torch.optim.SGD(p, 0.1))
    places = torch.tensor([[0, 1], [0, 2]])
    for value, skipped in ((1.0, False), (float("nan"), True), (float("inf"), True)):
        gradient = torch.sparse_coo_tensor(places, [value, 1.0], (4, 3), check_invariants=True)
        for sparse in (gradient, gradient.coalesce()):
            t.optimizer.zero_grad()
            t.backward()
            t.model.up.weight.grad = sparse
            t.optimizer.step()
            assert t.runtime.last_step_skipped == skipped


def test_a_sparse_gradient_without_values_is_finite() -> None:
    t = training(lambda p: torch.optim.SGD(p, 0.1))
    t.backward()
    t.model.up.weight.grad = torch.sparse_coo_tensor(size=(4, 3), check_invariants=True)
    t.optimizer.step()
    assert t.runtime.skipped_steps == 0


# The verdict that stays on the device.


class OnDevice:
    """A verdict that says it is on a GPU, and counts how often the host waited for it."""

    asked = 0
    device = SimpleNamespace(type="cuda")

    def __init__(self, verdict: Tensor) -> None:
        self._verdict = verdict

    def to(self, dtype: torch.dtype) -> Tensor:
        return self._verdict.to(dtype)

    def __bool__(self) -> bool:
        OnDevice.asked += 1
        return bool(self._verdict)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge as on a GPU: the optimizer itself reads the verdict, in ``found_inf``."""
    judge = optimizer_step.judge

    def judged(parameters: Any) -> Any:
        found = judge(parameters)
        if found is None:
            return None
        return SimpleNamespace(overflowed=found.overflowed, runtimes=found.runtimes, skip=OnDevice(found.skip))

    monkeypatch.setattr(optimizer_step, "judge", judged)
    monkeypatch.setattr(OnDevice, "asked", 0)


@pytest.fixture
def uninitialized_is_nan() -> Iterator[None]:
    """Memory that nobody wrote to is NaN, and not by chance zero."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


FUSED: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


@pytest.mark.usefixtures("on_device")
def test_a_fused_optimizer_skips_by_itself_and_changes_no_bit() -> None:
    for name, make in FUSED.items():
        t = training(make)
        t.step(seed=1)
        t.step(seed=2)
        before, asked = everything(t.optimizer), OnDevice.asked
        for count, overflow in enumerate(OVERFLOWS, 1):
            t.optimizer.zero_grad()
            overflow(t)
            t.optimizer.step()
            assert everything(t.optimizer) == before, (name, overflow)
            assert (t.runtime.skipped_steps, t.runtime.scale) == (count, SCALE / 2**count), (name, overflow)
        assert OnDevice.asked == asked, name  # the host runs ahead of the device


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.usefixtures("on_device", "uninitialized_is_nan")
def test_a_fused_optimizer_goes_on_as_if_its_first_step_had_not_been(name: str) -> None:
    # The first step is the one that most often overflows; state that it makes must be what a clean one starts from.
    undisturbed = training(FUSED[name])
    disturbed = training(FUSED[name], copy.deepcopy(undisturbed.model))
    disturbed.step(HUGE, seed=7)
    for seed in range(2):
        undisturbed.step(seed=seed)
        disturbed.step(seed=seed)
    assert everything(disturbed.optimizer) == everything(undisturbed.optimizer)
    assert (undisturbed.runtime.skipped_steps, disturbed.runtime.skipped_steps) == (0, 1)


@pytest.mark.usefixtures("on_device")
def test_a_fused_subclass_that_calls_super_is_judged_once() -> None:
    torch.optim.AdamW([torch.ones(1)])
    t = training(lambda p: CallsSuper(p, lr=0.1, fused=True), loss_scale={"init_scale": SCALE, "growth_interval": 2})
    assert [t.step(factor) or t.runtime.scale for factor in (1.0, HUGE, 1.0, 1.0)] == [1024.0, 512.0, 512.0, 1024.0]
    assert t.runtime.skipped_steps == 1


@pytest.mark.usefixtures("on_device")
def test_the_verdict_is_no_attribute_of_the_optimizer() -> None:
    # What stays there would be read by the next step, of a GradScaler for instance.
    t = training(FUSED["adamw"])
    before = set(t.optimizer.__dict__)
    for factor in (1.0, HUGE, 1.0):
        t.step(factor)
        assert set(t.optimizer.__dict__) == before


@pytest.mark.usefixtures("on_device")
def test_an_optimizer_that_reads_no_verdict_makes_the_host_ask() -> None:
    t = training(OPTIMIZERS["sgd"])
    before = everything(t.optimizer)
    t.step(HUGE)
    assert everything(t.optimizer) == before
    assert OnDevice.asked == 1


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
