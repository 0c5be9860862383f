"""A model loaded in 16 bits steps as one in fp32 does: bit for bit, and by updates too small for 16 bits."""

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import mpcompile
from mpcompile import MixprecWarning
from mpcompile.execution.stand_in import parameters_of
from tests.helpers import relative_error
from tests.master_weights_tools import (
    BF16,
    FP32,
    NO_MASTERS,
    OPTIMIZERS,
    Mixed,
    Net,
    Tied,
    assert_all_moved,
    assert_follow,
    assert_same,
    backward,
    batch,
    both_dtypes,
    every_optimizer,
    fp32_twin,
    give_gradients,
    masters_of,
    train,
    train_both,
    values,
)
from tests.test_programs import BOUND, mixprec


@both_dtypes
@every_optimizer
def test_a_step_is_the_step_of_fp32_parameters(make: Callable[..., Optimizer], dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    parameters = list(model.parameters())
    optimizer, masters = masters_of(model, make)
    twin = fp32_twin(parameters)
    reference = make(twin)
    for seed in range(5):
        train_both(model, optimizer, reference, (seed,), dtype)
        assert_follow(masters, parameters, twin)
    assert_same(optimizer.state_dict(), reference.state_dict())


@every_optimizer
def test_optimizer_state_is_fp32_and_belongs_to_the_parameters(make: Callable[..., Optimizer]) -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model, make)
    train(model, optimizer, range(2))
    assert {id(key) for key in optimizer.state} == {id(parameter) for parameter in model.parameters()}
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert {value.dtype for value in tensors} == {FP32}


def displacement(dtype: torch.dtype, *, masters: bool, compiled: bool) -> tuple[list[Tensor], int]:
    """How far 100 steps of AdamW with lr=1e-4 move each parameter (its master), and how many moved all of them."""
    torch.manual_seed(0)
    model = Net().bfloat16().to(dtype)  # whatever the dtype: the same values
    optimizer = AdamW(model.parameters(), lr=1e-4)
    held = mpcompile.master_weights(model, optimizer) if masters else None
    call = mixprec(model) if compiled else model
    x = (batch(BF16) / 2).to(dtype)
    target = torch.full((12, 4), 3.0, dtype=dtype)

    def now() -> list[Tensor]:
        return [value.double() for value in values(model.parameters() if held is None else held.values())]

    start = before = now()
    moved = 0
    for _ in range(100):
        optimizer.zero_grad()
        (call(x) - target).square().mean().backward()
        optimizer.step()
        moved += all(bool((new != old).any()) for new, old in zip(now(), before, strict=True))
        before = now()
    return [end - begin for end, begin in zip(before, start, strict=True)], moved


@pytest.fixture(scope="module")
def truth() -> list[Tensor]:
    return displacement(torch.float64, masters=False, compiled=False)[0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_updates_too_small_for_bf16_move_the_masters_as_in_fp64(compiled: bool, truth: list[Tensor]) -> None:
    found, moved = displacement(BF16, masters=True, compiled=compiled)
    assert moved == 100
    for one, other in zip(found, truth, strict=True):
        # Adam divides gradients by their size: the way errs as they do.
        assert relative_error(one, other) < BOUND


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_without_masters_such_updates_round_away(compiled: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MixprecWarning)
        found, moved = displacement(BF16, masters=False, compiled=compiled)
    assert moved == 0
    assert_same(found, [torch.zeros_like(way) for way in found])


def test_settings_of_groups_can_be_changed_between_steps() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model, OPTIMIZERS["AdamW"])
    parameters, twin = list(model.parameters()), fp32_twin(model.parameters())
    reference = OPTIMIZERS["AdamW"](twin)
    for seed, change in enumerate(({}, {"lr": 1e-2}, {"weight_decay": 0.5}, {"betas": (0.5, 0.9)}, {"lr": 0.0})):
        before = values(masters.values())
        for each in (optimizer, reference):
            each.param_groups[0].update(change)
        train_both(model, optimizer, reference, (seed,))
        assert_follow(masters, parameters, twin)
    assert_same(list(masters.values()), before)  # lr = 0


def test_a_learning_rate_scheduler_takes_effect() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model, functools.partial(SGD, lr=1.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(4):
        before = values(masters.values())
        optimizer.zero_grad()
        backward(model, BF16)
        optimizer.step()
        for new, old, parameter in zip(masters.values(), before, model.parameters(), strict=True):
            assert_same(new, old - 0.5**step * parameter.grad)
        scheduler.step()


def test_param_groups_keep_their_own_settings() -> None:
    model = Net().bfloat16()
    first, last = model.body[0], model.body[2]

    # Not in the order of the model's parameters.
    def make(groups: Sequence[Sequence[Tensor]]) -> Optimizer:
        return SGD([{"params": groups[0], "lr": 0.5}, {"params": groups[1], "momentum": 0.9}], lr=0.01)

    parameters = [last.weight, last.bias, first.bias, first.weight]
    twin = fp32_twin(parameters)
    optimizer, reference = make([parameters[:2], parameters[2:]]), make([twin[:2], twin[2:]])
    masters = mpcompile.master_weights(model, optimizer)
    train_both(model, optimizer, reference, range(3))
    assert list(masters) == ["body.2.weight", "body.2.bias", "body.0.bias", "body.0.weight"]
    assert_follow(masters, parameters, twin)
    assert [id(p) for p in parameters_of(optimizer)] == [id(p) for p in parameters]


def test_two_optimizers_share_a_model() -> None:
    model = Net().bfloat16()
    optimizers = [SGD(model.body[0].parameters(), lr=0.1), Adam(model.body[2].parameters(), lr=0.1)]
    masters = [mpcompile.master_weights(model, optimizer) for optimizer in optimizers]
    twins = [fp32_twin(parameters_of(optimizer)) for optimizer in optimizers]
    references = [SGD(twins[0], lr=0.1), Adam(twins[1], lr=0.1)]
    backward(model, BF16)
    for optimizer, twin, reference in zip(optimizers, twins, references, strict=True):
        give_gradients(twin, parameters_of(optimizer))
        optimizer.step()
        reference.step()
    for optimizer, held, twin in zip(optimizers, masters, twins, strict=True):
        assert_follow(held, parameters_of(optimizer), twin)
    assert_same(list(model.state_dict().values()), values(itertools.chain(*twins)))


def test_tied_weights_have_one_master() -> None:
    model = Tied().bfloat16()
    optimizer, masters = masters_of(model)
    assert list(masters) == ["first.weight"]
    twin = fp32_twin(model.parameters())
    reference = OPTIMIZERS["SGD"](twin)
    model(batch(BF16, features=4)).float().square().mean().backward()
    give_gradients(twin, model.parameters())
    optimizer.step()
    reference.step()
    assert_follow(masters, list(model.parameters()), twin)
    assert model.second.weight is model.first.weight


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fp32_parameters_are_their_own_masters(compiled: bool) -> None:
    model = Mixed(BF16)
    optimizer, masters = masters_of(model, OPTIMIZERS["AdamW"])
    assert set(masters) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    parameters, twin = list(model.parameters()), fp32_twin(model.parameters())
    reference = OPTIMIZERS["AdamW"](twin)
    call = mixprec(model) if compiled else model
    train_both(call, optimizer, reference, range(3))
    assert_same(list(model.state_dict().values()), values(twin))
    assert_same(values(parameters), [own.detach().to(p.dtype) for own, p in zip(twin, parameters, strict=True)])
    # The state dict holds the fp32 parameters themselves, as ever.
    assert model.state_dict()["norm.weight"].data_ptr() == model.norm.weight.data_ptr()


def test_frozen_parameters_stay() -> None:
    model = Net().bfloat16()
    model.body[0].requires_grad_(False)
    optimizer, masters = masters_of(model, OPTIMIZERS["AdamW"])
    start = values(model.parameters())
    train(model, optimizer, range(3))
    assert_same(values(model.body[0].parameters()), start[:2])
    assert_same(list(masters.values())[:2], [value.float() for value in start[:2]])
    assert_all_moved(list(masters.values())[2:], start[2:])


def test_a_parameter_the_optimizer_does_not_hold_is_left_alone() -> None:
    model = Net().bfloat16()
    optimizer = SGD(model.body[0].parameters(), lr=0.1)
    assert set(mpcompile.master_weights(model, optimizer)) == {"body.0.weight", "body.0.bias"}
    backward(model, BF16)
    assert {parameter.grad.dtype for parameter in model.body[0].parameters()} == {FP32}
    assert {parameter.grad.dtype for parameter in model.body[2].parameters()} == {BF16}
    assert model.state_dict()["body.2.weight"].dtype is BF16


def test_parameters_without_a_gradient_are_not_stepped() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model, OPTIMIZERS["AdamW"])
    train(model, optimizer, (0,))
    start = values(masters.values())
    backward(model, BF16, (1,))
    model.body[0].weight.grad = None
    optimizer.step()
    assert_same(masters["body.0.weight"], start[0])
    assert bool((masters["body.0.bias"] != start[1]).any())


def test_state_that_was_there_before_is_continued_in_fp32() -> None:
    model = Net().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(2))
    parameters, twin = list(model.parameters()), fp32_twin(model.parameters())
    reference = AdamW(twin, lr=1e-3)
    for own, parameter in zip(twin, parameters, strict=True):
        reference.state[own] = {key: value.float().clone() for key, value in optimizer.state[parameter].items()}
    masters = mpcompile.master_weights(model, optimizer)
    assert_same(optimizer.state_dict(), reference.state_dict())
    train_both(model, optimizer, reference, (2,))
    assert_follow(masters, parameters, twin)


def test_training_without_masters_still_works() -> None:
    model = nn.Linear(8, 4).bfloat16()
    optimizer = SGD(model.parameters(), lr=0.2)
    compiled = mixprec(model)
    x, target = batch(BF16), batch(BF16, 1)[:, :4]
    losses = []
    with pytest.warns(MixprecWarning, match=NO_MASTERS):
        compiled(x)
    for _ in range(20):
        optimizer.zero_grad()
        loss = (compiled(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert {value.dtype for p in model.parameters() for value in (p, p.grad)} == {BF16}
    assert {value.dtype for value in model.state_dict().values()} == {BF16}
