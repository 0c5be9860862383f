"""Gradients of parameters with master weights are fp32: accumulated, cleared and clipped as such."""

import copy
import functools

import pytest
import torch
from torch.optim import SGD

from tests.helpers import relative_error
from tests.master_weights_tools import BF16, FP32, Net, assert_same, backward, batch, masters_of, values
from tests.test_programs import mixprec


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
