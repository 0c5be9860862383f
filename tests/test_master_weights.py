"""A model loaded in 16 bits trains as one in fp32 does: fp32 masters are stepped, saved and restored.

The truth is the same optimizer on fp32 parameters with the same gradients, bit for bit, or a model in fp64.
"""

import copy
import functools
import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import mpcompile
from mpcompile import MasterWeights, MixprecError, MixprecWarning
from mpcompile.execution.stand_in import parameters_of
from tests.helpers import relative_error
from tests.test_programs import BOUND, mixprec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NO_MASTERS = "no float32 master copy"

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": functools.partial(SGD, lr=0.01, momentum=0.9),
    "Adam": functools.partial(Adam, lr=1e-3),
    "AdamW": functools.partial(AdamW, lr=1e-3),
    "AdamW fused": functools.partial(AdamW, lr=1e-3, fused=True),
    "AdamW amsgrad": functools.partial(AdamW, lr=1e-3, amsgrad=True, foreach=True),
    "Adagrad": functools.partial(Adagrad, lr=1e-3),
    "RMSprop": functools.partial(RMSprop, lr=1e-4, momentum=0.5),
}
every_optimizer = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in OPTIMIZERS.items()])
both_dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


class Net(nn.Module):
    """Weights between 1/4 and 3/4 in size: bf16 numbers are 2^-9 apart there, and an update of 1e-4 rounds away."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_((0.25 + 0.5 * torch.rand_like(parameter)) * torch.randn_like(parameter).sign())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Loss(nn.Module):
    """A model that computes its own loss, so that gradients of any size begin inside the graph."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.factor = factor

    def forward(self, x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        y = self.body(x)
        return (y if y.dtype is torch.float64 else y.float()).square().mean() * self.factor * weight


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Mixed(nn.Module):
    """16-bit layers with an fp32 norm between them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6, dtype=dtype), nn.Linear(6, 4, dtype=dtype)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x).float()).to(x.dtype))


def masters_of(model: nn.Module, make: Callable[..., Optimizer] = OPTIMIZERS["SGD"]) -> tuple[Optimizer, MasterWeights]:
    """An optimizer of all parameters, with masters."""
    optimizer = make(model.parameters())
    return optimizer, mpcompile.master_weights(model, optimizer)


def batch(dtype: torch.dtype, seed: int = 0, features: int = 8) -> Tensor:
    return torch.randn(12, features, generator=torch.Generator().manual_seed(seed)).to(dtype)


def backward(model: Callable[..., Any], dtype: torch.dtype, seeds: Iterable[int] = (0,)) -> None:
    """Accumulate gradients that are different with every seed."""
    for seed in seeds:
        model(batch(dtype, seed)).float().square().mean().backward()


def train(model: Callable[..., Any], optimizer: Optimizer, seeds: Iterable[int], dtype: torch.dtype = BF16) -> None:
    """One step for each seed."""
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, dtype, (seed,))
        optimizer.step()


def assert_same(found: Any, expected: Any) -> None:
    """Equal bit for bit, dtypes included, as deep as it goes."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def assert_all_moved(now: Iterable[Tensor], before: Iterable[Tensor]) -> None:
    """Every tensor has an element that changed."""
    assert all(bool((new != old).any()) for new, old in zip(now, before, strict=True))


def values(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies."""
    return [tensor.detach().clone() for tensor in tensors]


def everything(model: nn.Module, optimizer: Optimizer) -> Any:
    """A copy of parameters, masters, optimizer state and settings."""
    return copy.deepcopy((values(model.parameters()), model.state_dict(), optimizer.state_dict()))


def fp32_twin(parameters: Iterable[Tensor]) -> list[Tensor]:
    """fp32 parameters of the same values."""
    return [nn.Parameter(parameter.detach().float()) for parameter in parameters]


def give_gradients(twin: Iterable[Tensor], parameters: Iterable[Tensor]) -> None:
    """Copies of the gradients, in fp32."""
    for own, parameter in zip(twin, parameters, strict=True):
        own.grad = None if parameter.grad is None else parameter.grad.float().clone()


def assert_follow(masters: MasterWeights, parameters: Sequence[Tensor], twin: Sequence[Tensor]) -> None:
    """The masters are the twin, and the parameters are the masters rounded."""
    assert_same(list(masters.values()), values(twin))
    assert_same(values(parameters), [own.detach().to(p.dtype) for own, p in zip(twin, parameters, strict=True)])


# Steps


@both_dtypes
@every_optimizer
def test_a_step_is_the_step_of_fp32_parameters(make: Callable[..., Optimizer], dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    parameters = list(model.parameters())
    optimizer, masters = masters_of(model, make)
    twin = fp32_twin(parameters)
    reference = make(twin)
    for seed in range(5):
        optimizer.zero_grad()
        backward(model, dtype, (seed,))
        give_gradients(twin, parameters)
        optimizer.step()
        reference.step()
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
        optimizer.zero_grad()
        backward(model, BF16, (seed,))
        give_gradients(twin, parameters)
        optimizer.step()
        reference.step()
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
    for seed in range(3):
        optimizer.zero_grad()
        backward(model, BF16, (seed,))
        give_gradients(twin, parameters)
        optimizer.step()
        reference.step()
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
    for seed in range(3):
        optimizer.zero_grad()
        backward(call, BF16, (seed,))
        give_gradients(twin, parameters)
        optimizer.step()
        reference.step()
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
    optimizer.zero_grad()
    backward(model, BF16, (2,))
    give_gradients(twin, parameters)
    optimizer.step()
    reference.step()
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


# Gradients


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_micro_batches_are_accumulated_in_fp32(compiled: bool) -> None:
    model = Net().bfloat16()
    masters_of(model)
    call = mixprec(model) if compiled else model
    single = []
    for seed in range(4):
        model.zero_grad()
        backward(call, BF16, (seed,))
        single.append(values(parameter.grad for parameter in model.parameters()))
    model.zero_grad()
    backward(call, BF16, range(4))
    for parameter, parts in zip(model.parameters(), zip(*single, strict=True), strict=True):
        assert parameter.grad.dtype is FP32
        truth = sum(part.double() for part in parts)
        # Three fp32 additions, each of which rounds by 2^-24 of what it adds; bf16 would round by 2^-9.
        bound = 3 * 2.0**-24 * sum(part.double().abs() for part in parts)
        assert bool(((parameter.grad.double() - truth).abs() <= bound).all())


def test_accumulated_gradients_are_those_of_fp64() -> None:
    model = Net().bfloat16()
    twin = copy.deepcopy(model).double()
    masters_of(model)
    backward(mixprec(model), BF16, range(4))
    for seed in range(4):
        twin(batch(BF16, seed).double()).square().mean().backward()
    for parameter, truth in zip(model.parameters(), twin.parameters(), strict=True):
        # A handful of bf16 roundings on the way to each gradient.
        assert relative_error(parameter.grad, truth.grad) < 5 * 2.0**-9


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_cleared(set_to_none: bool) -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model, functools.partial(SGD, lr=0.5))
    for seed in range(3):
        start = values(masters.values())
        optimizer.zero_grad(set_to_none=set_to_none)
        left = [parameter.grad for parameter in model.parameters()]
        if set_to_none or seed == 0:
            assert left == [None] * 4
        else:
            assert_same(left, [torch.zeros_like(parameter, dtype=FP32) for parameter in model.parameters()])
        backward(model, BF16, (seed,))
        gradients = values(parameter.grad for parameter in model.parameters())
        optimizer.step()
        assert_same(list(masters.values()), [old - 0.5 * g for old, g in zip(start, gradients, strict=True)])


def test_gradients_that_are_clipped_are_those_stepped() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model, functools.partial(SGD, lr=1.0))
    start = values(masters.values())
    backward(model, BF16)
    raw = torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    step = torch.cat([(old - new).double().flatten() for old, new in zip(start, masters.values(), strict=True)])
    assert float(norm) == pytest.approx(float(raw.norm()), rel=1e-5)
    assert norm > 0.2
    # old - new of values below 1 errs by 2^-24 of them.
    torch.testing.assert_close(step, raw * (0.1 / raw.norm()), rtol=1e-4, atol=2.0**-23)


def test_a_gradient_that_was_there_before_is_kept() -> None:
    model = Net().bfloat16()
    backward(model, BF16)
    before = values(parameter.grad for parameter in model.parameters())
    masters_of(model)
    assert_same([parameter.grad for parameter in model.parameters()], [gradient.float() for gradient in before])


# fp16


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


# Checkpoints


def assert_fp32_masters(state: dict[str, Any], masters: MasterWeights) -> None:
    assert_same({name: state[name] for name in masters}, dict(masters))
    assert {value.dtype for value in state.values()} == {FP32}


def test_the_state_dict_holds_the_masters_under_the_same_keys() -> None:
    model = Net().bfloat16()
    keys = list(model.state_dict())
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    state = model.state_dict()
    assert list(state) == keys
    assert_fp32_masters(state, masters)
    assert any(bool((value != value.bfloat16().float()).any()) for value in state.values())


def test_a_compiled_model_and_a_parent_have_them_under_their_own_keys() -> None:
    model = Net().bfloat16()
    compiled = mixprec(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    masters = mpcompile.master_weights(compiled, optimizer)
    train(compiled, optimizer, range(2))
    parent = nn.ModuleDict({"part": model})
    for prefix, state in (("_orig_mod.", compiled.state_dict()), ("part.", parent.state_dict())):
        assert_same(dict(state), {prefix + name: value for name, value in masters.items()})


def test_buffers_are_saved_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).bfloat16()
    masters_of(model)
    state = model.state_dict()
    assert state["1.running_mean"].dtype is BF16
    assert state["1.running_mean"].data_ptr() == model[1].running_mean.data_ptr()
    assert state["1.num_batches_tracked"].dtype is torch.int64


def test_both_names_of_a_tied_weight_are_saved_as_its_master() -> None:
    model = Tied().bfloat16()
    optimizer, masters = masters_of(model)
    model(batch(BF16, features=4)).float().square().mean().backward()
    optimizer.step()
    master = masters["first.weight"]
    assert_same(dict(model.state_dict()), {"first.weight": master, "second.weight": master})


def test_loading_restores_the_masters_exactly() -> None:
    model, fresh = Net().bfloat16(), Net().bfloat16()
    optimizer, _ = masters_of(model)
    train(model, optimizer, range(3))
    state = copy.deepcopy(model.state_dict())
    _, masters = masters_of(fresh)
    fresh.load_state_dict(state)
    assert_same(dict(masters), dict(state))
    assert_same(values(fresh.parameters()), values(model.parameters()))
    assert_same(fresh.state_dict(), state)


@both_dtypes
def test_a_16_bit_state_dict_becomes_the_masters(dtype: torch.dtype) -> None:
    model, other = Net().to(dtype), Net().to(dtype)
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2), dtype)
    model.load_state_dict(other.state_dict())
    assert_same(dict(masters), {name: parameter.detach().float() for name, parameter in other.named_parameters()})
    assert_same(values(model.parameters()), values(other.parameters()))


def test_loading_a_part_leaves_the_rest() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    before = copy.deepcopy(dict(masters))
    new = torch.rand(4) / 3
    model.load_state_dict({"body.2.bias": new}, strict=False)
    assert_same(dict(masters), {**before, "body.2.bias": new})


def test_an_optimizer_state_dict_is_restored_without_rounding() -> None:
    models = [Net().bfloat16() for _ in range(2)]
    optimizer, fresh = (masters_of(model, OPTIMIZERS["AdamW"])[0] for model in models)
    train(models[0], optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    fresh.load_state_dict(state)
    assert_same(fresh.state_dict(), state)


def test_the_state_of_an_optimizer_without_masters_is_continued_in_fp32() -> None:
    plain, model = Net().bfloat16(), Net().bfloat16()
    without = AdamW(plain.parameters(), lr=1e-3)
    train(plain, without, range(2))
    optimizer, masters = masters_of(model, OPTIMIZERS["AdamW"])
    saved = without.state_dict()
    optimizer.load_state_dict(copy.deepcopy(saved))
    parameters, twin = list(model.parameters()), fp32_twin(model.parameters())
    reference = OPTIMIZERS["AdamW"](twin)
    reference.load_state_dict(copy.deepcopy(saved))
    backward(model, BF16, (2,))
    give_gradients(twin, parameters)
    optimizer.step()
    reference.step()
    assert_follow(masters, parameters, twin)
    assert_same(optimizer.state_dict(), reference.state_dict())


def save(path: Path, model: nn.Module, optimizer: Optimizer, compiled: Any) -> None:
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "runtime": mpcompile.runtime(compiled).state_dict(),
        },
        path,
    )


def load(path: Path, model: nn.Module, optimizer: Optimizer, compiled: Any) -> None:
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    mpcompile.runtime(compiled).load_state_dict(saved["runtime"])


def assert_resumes(make: Callable[..., Optimizer], path: Path, *, anew: bool, **options: Any) -> dict[str, Any]:
    """3 + 3 steps end alike in one run and in one that starts from a file in the middle; return the runtime's state.

    ``anew``: compile the second model, which otherwise runs the code of the first.
    """
    dtype = {"fp16": FP16, "bf16": BF16}[options["dtype"]]
    model = Net().to(dtype)
    optimizer, _ = masters_of(model, make)
    compiled = mixprec(model, **options)
    train(compiled, optimizer, range(3), dtype)
    save(path, model, optimizer, compiled)
    train(compiled, optimizer, range(3, 6), dtype)

    if anew:
        torch._dynamo.reset()
    fresh = Net().to(dtype)
    continued, _ = masters_of(fresh, make)
    again = mixprec(fresh, **options)
    load(path, fresh, continued, again)
    train(again, continued, range(3, 6), dtype)
    assert_same(everything(fresh, continued), everything(model, optimizer))
    state = mpcompile.runtime(compiled).state_dict()
    assert mpcompile.runtime(again).state_dict() == state
    return state


@every_optimizer
def test_a_resumed_run_is_the_uninterrupted_one(make: Callable[..., Optimizer], tmp_path: Path) -> None:
    # The loss scale doubles with every second step: the one that is saved is not what a new run begins with.
    scale = {"init_scale": 16.0, "growth_interval": 2}
    state = assert_resumes(make, tmp_path / "checkpoint.pt", anew=False, dtype="fp16", loss_scale=scale)
    assert state["scale"] == 128.0


@both_dtypes
def test_a_resumed_run_that_compiles_anew_is_the_uninterrupted_one(dtype: torch.dtype, tmp_path: Path) -> None:
    make, name = OPTIMIZERS["AdamW"], {FP16: "fp16", BF16: "bf16"}[dtype]
    assert_resumes(make, tmp_path / "checkpoint.pt", anew=True, dtype=name)


# Writes from outside


def write_in_place(parameter: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def write_element(parameter: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        for i, element in enumerate(value.flatten()):
            parameter.view(-1)[i] = element


def write_data(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data.copy_(value)


def replace_data(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data = value.clone()


@pytest.mark.parametrize("write", [write_in_place, write_element, write_data, replace_data])
@both_dtypes
def test_a_write_from_outside_becomes_the_master(write: Callable[..., None], dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    optimizer, masters = masters_of(model, functools.partial(SGD, lr=0.5))
    train(model, optimizer, range(2), dtype)
    weight, others = model.body[2].weight, copy.deepcopy(dict(masters))
    # Far from what is there: an element that is written as it was keeps its master.
    new = torch.rand(4, 16).add(4).to(dtype)
    write(weight, new)
    assert_same(model.state_dict()["body.2.weight"], new.float())
    assert_same(dict(masters), {**others, "body.2.weight": new.float()})
    optimizer.zero_grad()
    backward(model, dtype)
    optimizer.step()
    assert_same(masters["body.2.weight"], new.float() - 0.5 * weight.grad)


def test_a_write_straight_before_a_step_is_stepped_from() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model, functools.partial(SGD, lr=0.5))
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    backward(model, BF16)
    new = torch.rand(4).add(4).bfloat16()
    write_in_place(model.body[2].bias, new)
    optimizer.step()
    assert_same(masters["body.2.bias"], new.float() - 0.5 * model.body[2].bias.grad)


def test_a_write_into_some_elements_leaves_the_others_exact() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    expected = masters["body.0.weight"].clone()
    with torch.no_grad():
        model.body[0].weight[3].fill_(0.125)
    expected[3] = 0.125
    assert_same(model.state_dict()["body.0.weight"], expected)


def test_a_mapping_read_after_a_write_sees_it() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    new = torch.rand(4).add(4).bfloat16()
    write_in_place(model.body[2].bias, new)
    assert_same(masters["body.2.bias"], new.float())


def test_a_write_of_what_is_there_already_keeps_the_master() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    before = copy.deepcopy(dict(masters))
    for parameter in model.parameters():
        write_in_place(parameter, parameter.clone())
    assert_same(dict(model.state_dict()), before)


def test_values_beyond_fp16_keep_their_master() -> None:
    # The parameter rounds to infinity, which must not be taken for a write.
    model = nn.Linear(8, 4).half()
    optimizer, masters = masters_of(model, functools.partial(SGD, lr=1.0))
    model.bias.grad = torch.full((4,), -1e6)
    optimizer.step()
    assert bool(torch.isinf(model.bias).all())
    assert_same(model.state_dict()["bias"], masters["bias"])
    model.bias.grad = torch.full((4,), 1e6)
    optimizer.step()
    # 1e6 - 1e6: what is left is the bias of the beginning, to fp32's 2^-5 at 1e6, and no infinity.
    assert float(masters["bias"].abs().amax()) < 1.0
    assert_same(model.bias.detach(), masters["bias"].half())


def test_a_nan_written_from_outside_is_not_hidden() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    with torch.no_grad():
        model.body[2].bias[1] = torch.nan
    backward(model, BF16)
    optimizer.step()
    assert masters["body.2.bias"].isnan().tolist()[1]


def test_weights_clipped_by_a_step_hook_stay_clipped() -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model, functools.partial(SGD, lr=0.5))

    @torch.no_grad()
    def clip(*_: Any) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.25, 0.25)

    optimizer.register_step_post_hook(clip)
    train(model, optimizer, range(2))
    for value in (*values(model.parameters()), *model.state_dict().values()):
        assert float(value.abs().amax()) <= 0.25  # nearly all of them were beyond


def test_a_step_hook_sees_the_parameters_as_stepped() -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model, functools.partial(SGD, lr=0.5))
    seen: list[list[Tensor]] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(values(model.parameters())))
    train(model, optimizer, (0,))
    assert_same(seen, [values(model.parameters())])


def test_a_replaced_parameter_is_an_error_at_the_next_step() -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model)
    train(model, optimizer, (0,))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(MixprecError, match=r"Parameter 'body.0.weight' of the model was replaced.*assign=False"):
        optimizer.step()


def test_what_was_loaded_with_assign_is_what_is_saved_next() -> None:
    model, other = Net().bfloat16(), Net().bfloat16()
    masters_of(model)
    loaded = {name: parameter.detach().float() for name, parameter in other.named_parameters()}
    model.load_state_dict(loaded, assign=True)
    assert_same(dict(model.state_dict()), loaded)


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model)
    train(model, optimizer, range(2))
    twin = copy.deepcopy(model)
    before = everything(model, optimizer)
    # As for an average of the weights: written by copying, and by loading.
    for parameter in twin.parameters():
        write_in_place(parameter, parameter / 2)
    saved = values(value.float() for value in twin.state_dict().values())
    assert_same(saved, [parameter.float() for parameter in values(twin.parameters())])
    twin.load_state_dict({name: value * 0 for name, value in twin.state_dict().items()})
    assert not any(bool(value.any()) for value in (*values(twin.parameters()), *twin.state_dict().values()))
    assert_same(everything(model, optimizer), before)


def test_a_whole_model_can_still_be_saved(tmp_path: Path) -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model)
    train(model, optimizer, range(2))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same(values(loaded.parameters()), values(model.parameters()))


def test_model_and_optimizer_are_freed_when_they_are_let_go() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    model.state_dict()
    gone = [weakref.ref(each) for each in (model, optimizer, masters)]
    gc.collect()
    gc.disable()  # so that a cycle of references would keep them
    try:
        del model, optimizer, masters
        assert [reference() for reference in gone] == [None] * 3
    finally:
        gc.enable()


# What is refused, and what is left alone


def test_masters_are_made_once() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    train(model, optimizer, range(2))
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match="has master weights already"):
        mpcompile.master_weights(model, optimizer)
    assert_same(everything(model, optimizer), before)
    train(model, optimizer, (2,))
    assert_fp32_masters(model.state_dict(), masters)


def test_a_parameter_of_another_model_is_refused_and_nothing_done() -> None:
    model, other = Net().bfloat16(), nn.Linear(3, 2).bfloat16()
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"bfloat16 parameter of shape \(2, 3\) that is not among model.parameters"):
        mpcompile.master_weights(model, optimizer)
    assert {parameter.grad_dtype for parameter in model.parameters()} == {BF16}
    assert {value.dtype for value in model.state_dict().values()} == {BF16}
    assert len(mpcompile.master_weights(nn.ModuleList([model, other]), optimizer)) == 6


def test_an_fp32_parameter_of_another_model_is_fine() -> None:
    model, other = Net().bfloat16(), nn.Linear(3, 2)
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.5)
    mpcompile.master_weights(model, optimizer)
    before = values(other.parameters())
    other(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    assert_same(
        values(other.parameters()), [old - 0.5 * p.grad for old, p in zip(before, other.parameters(), strict=True)]
    )


def test_an_fp32_model_is_left_alone() -> None:
    model = Net()
    twin = copy.deepcopy(model)
    optimizer, reference = AdamW(model.parameters(), lr=1e-3), AdamW(twin.parameters(), lr=1e-3)
    masters = mpcompile.master_weights(model, optimizer)
    assert dict(masters) == {}
    train(model, optimizer, range(3), FP32)
    train(twin, reference, range(3), FP32)
    assert_same(everything(model, optimizer), everything(twin, reference))
    places = [value.data_ptr() for value in model.state_dict().values()]
    assert places == [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_a_closure_is_refused_and_nothing_done(how: str) -> None:
    model = Net().bfloat16()
    optimizer, _ = masters_of(model)
    backward(model, BF16)
    before = everything(model, optimizer)

    def closure() -> float:
        raise AssertionError

    with pytest.raises(MixprecError, match=r"optimizer.step\(closure\)"):
        optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)
    assert_same(everything(model, optimizer), before)
    optimizer.step(None)
    assert_all_moved(model.state_dict().values(), before[1].values())


def test_the_warning_of_missing_masters_names_the_remedy() -> None:
    with pytest.warns(MixprecWarning, match=rf"4 trained parameters are float16: they have {NO_MASTERS}.*") as caught:
        mixprec(Net().half(), dtype="fp16")(batch(FP16))
    assert any("mpcompile.master_weights(model, optimizer)" in str(warning.message) for warning in caught)


@both_dtypes
def test_a_model_with_masters_is_compiled_without_a_word(dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    masters_of(model)
    # Warnings are errors when strict.
    backward(mixprec(model, dtype="bf16" if dtype is BF16 else "fp16", strict=True), dtype)


def test_masters_of_a_part_do_not_hide_what_the_rest_lacks() -> None:
    model = Net().bfloat16()
    mpcompile.master_weights(model, SGD(model.body[0].parameters(), lr=0.1))
    with pytest.warns(MixprecWarning, match=f"2 trained parameters are bfloat16: they have {NO_MASTERS}"):
        mixprec(model)(batch(BF16))


# The mapping


def test_it_is_a_mapping_of_the_trained_16_bit_parameters() -> None:
    model = Mixed(FP16)
    optimizer = SGD(reversed(list(model.parameters())), lr=0.1)
    masters = mpcompile.master_weights(model, optimizer)
    names = ["second.bias", "second.weight", "first.bias", "first.weight"]
    assert list(masters) == list(masters.keys()) == names
    assert len(masters) == 4
    assert ("first.weight" in masters, "norm.weight" in masters) == (True, False)
    assert masters.get("norm.weight", 5) == 5
    with pytest.raises(KeyError, match=r"norm\.weight"):
        masters["norm.weight"]
    parameters = dict(model.named_parameters())
    assert_same(dict(masters), {name: parameters[name].detach().float() for name in names})


def test_it_shows_the_masters_of_now_and_not_for_training() -> None:
    model = Net().bfloat16()
    optimizer, masters = masters_of(model)
    held = masters["body.0.bias"]
    before = held.clone()
    train(model, optimizer, range(2))
    assert_same(held, masters["body.0.bias"])
    assert bool((held != before).all())
    assert not held.requires_grad


# Optimizers of the user's own


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
    for seed in range(3):
        optimizer.zero_grad()
        backward(model, BF16, (seed,))
        give_gradients(twin, parameters)
        optimizer.step()
        reference.step()
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
