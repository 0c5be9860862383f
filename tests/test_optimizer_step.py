"""An optimizer step whose gradients overflowed is left out as if it had not been called, and no other step is."""

import copy

import torch

from tests.optimizer_step_tools import (
    HUGE,
    OPTIMIZERS,
    OVERFLOWS,
    Net,
    assert_every_overflow_is_skipped,
    bits,
    copy_gradients,
    everything,
    training,
)

# The optimizers take turns within a test: their models have one structure, so that Dynamo compiles it once.


def test_a_skipped_step_changes_no_bit() -> None:
    for name, make in OPTIMIZERS.items():
        t = training(make)
        t.step(seed=1)
        t.step(seed=2)
        assert_every_overflow_is_skipped(t, name)


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


def test_an_overflow_that_was_thrown_away_does_not_skip_the_next_step() -> None:
    t = training()
    t.backward(HUGE)
    t.optimizer.zero_grad()
    before = everything(t.optimizer)
    t.step()
    assert everything(t.optimizer) != before


# Gradients that the loop sets itself.


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
