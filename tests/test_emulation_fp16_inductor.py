"""Emulated fp16 through Inductor, whose generated code could keep an unrounded value in a register."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from mpcompile import joint_pass
from mpcompile.backend import mixprec
from tests.fp16_truth import (
    LARGEST,
    SMALLEST,
    TIE_TO_INFINITY,
    accumulated,
    assert_is_the_sum,
    assert_rounds_the_sum,
    fp16,
    integers,
    normal,
    product,
    same,
)


@pytest.fixture(scope="module", autouse=True)
def _no_native_fp16() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_pass, "has_native_fp16", lambda _: False)
        yield


def generated(fn: Callable[..., Any], *inputs: Tensor) -> Callable[..., Sequence[Tensor]]:
    """What the backend makes of a function of leaves through Inductor, to be called on inputs like these.

    It outlives the reset of Dynamo after each test, so that several tests share one compilation.
    """
    compiled: list[Callable[..., Any]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled.append(mixprec(gm, example_inputs, options={"dtype": "fp16", "loss_scale": None}))
        return compiled[0]

    torch.compile(fn, backend=backend, dynamic=False)(*inputs)
    return compiled[0]


def leaves(*values: Tensor) -> list[Tensor]:
    """Copies whose gradients are computed."""
    return [value.clone().requires_grad_() for value in values]


def layers(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    """Two layers with something elementwise between them."""
    return nn.functional.linear(nn.functional.linear(x, w1, b1).relu() * 1.5, w2)


class Compiled:
    """One graph of a matmul and, beside it, two layers: compiling takes half a minute."""

    def __init__(self) -> None:
        self._idle = ([normal(32, 4), normal(4, 8)], [normal(4, 4), normal(6, 4), normal(6), normal(4, 6)])
        self._call = generated(lambda x, w, *values: (x @ w, layers(*values)), *leaves(*self._idle[0], *self._idle[1]))

    def mm(self, *values: Tensor) -> Tensor:
        """The matmul [32, 4] by [4, 8]."""
        return self._call(*leaves(*values, *self._idle[1]))[0].detach()

    def mm_gradients(self, values: Sequence[Tensor], tangent: Tensor) -> list[Tensor]:
        """Its gradients."""
        inputs = leaves(*values, *self._idle[1])
        self._call(*inputs)[0].backward(tangent)
        return [value.grad for value in inputs[:2] if value.grad is not None]

    def layers(self, *values: Tensor) -> Tensor:
        """The two layers: 4 to 6 to 4 features, 4 rows."""
        return self._call(*leaves(*self._idle[0], *values))[1].detach()

    def layers_gradients(self, values: Sequence[Tensor], tangent: Tensor) -> list[Tensor]:
        """Their gradients."""
        inputs = leaves(*self._idle[0], *values)
        self._call(*inputs)[1].backward(tangent)
        return [value.grad for value in inputs[2:] if value.grad is not None]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return Compiled()


@pytest.mark.inductor
@pytest.mark.parametrize(("x_bits", "w_bits", "g_bits"), [(12, 6, 6), (6, 12, 6), (6, 6, 12)])
def test_a_matmul_and_its_gradients_are_bitwise(compiled: Compiled, x_bits: int, w_bits: int, g_bits: int) -> None:
    # fp16 has 11 bits: in each case one operand is rounded, and so is the result.
    x, w, g = integers(32, 4, bits=x_bits), integers(4, 8, bits=w_bits) / 32, integers(32, 8, bits=g_bits) / 64
    y = compiled.mm(x, w)
    assert same(y, product(x, w))
    dx, dw = compiled.mm_gradients((x, w), g)
    # Gradients of leaves leave as they were accumulated in fp32.
    assert same(dx, accumulated(g, w.t()))
    assert same(dw, accumulated(x.t(), g))
    assert not torch.equal(y, x @ w)


@pytest.mark.inductor
@pytest.mark.parametrize("power", [-20, -8, 0, 7, 8])
def test_a_matmul_of_random_numbers_rounds_a_sum_in_fp32(compiled: Compiled, power: int) -> None:
    # From results that are mostly subnormal to some that overflow.
    x, w, g = normal(32, 4) * 2.0**power, normal(4, 8, seed=1) * 2.0 ** min(power, 7), normal(32, 8, seed=2)
    assert_rounds_the_sum(compiled.mm(x, w), x, w)
    dx, dw = compiled.mm_gradients((x, w), g)
    assert_is_the_sum(dx, g, w.t())
    assert_is_the_sum(dw, x.t(), g)


@pytest.mark.inductor
def test_sums_overflow_from_the_tie_to_infinity_on(compiled: Compiled) -> None:
    # Sums of 65472 and a step, which reaches the tie at 48.
    steps = torch.cat((torch.arange(40, 56), torch.tensor([47.96875, 48.03125]), torch.arange(56, 63), torch.arange(7)))
    x = torch.stack((torch.full((32,), 1023.0), steps, torch.zeros(32), torch.zeros(32)), 1)
    w = torch.tensor([64.0, 1.0, 0.0, 0.0])[:, None] * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    sums = x.double() @ w.double()
    y = compiled.mm(x, w)
    assert same(y, product(x, w))
    assert torch.equal(y.isinf(), sums.abs() >= TIE_TO_INFINITY)
    assert 0 < int(y.isinf().sum()) < y.numel()
    assert float(y[~y.isinf()].max()) == LARGEST


@pytest.mark.inductor
def test_operands_overflow_from_the_tie_to_infinity_on(compiled: Compiled) -> None:
    x = torch.zeros(32, 4)
    x[:, 0] = torch.linspace(65504, 65535, 32)
    w = torch.ones(4, 8)
    w[1:] = 0
    y = compiled.mm(x, w)
    assert same(y, fp16(x[:, :1]).expand(32, 8))
    assert torch.equal(y.isinf(), (x[:, :1] >= TIE_TO_INFINITY).expand(32, 8))


@pytest.mark.inductor
def test_subnormals_are_kept(compiled: Compiled) -> None:
    x, w = integers(32, 4, bits=11) * SMALLEST, integers(4, 8, bits=3)
    for one, other in ((x, w), (x * 2.0**12, w * 2.0**-12), (x, w / 8)):
        y = compiled.mm(one, other)
        assert same(y, product(one, other))
        assert bool(((y != 0) & (y.abs() < 2.0**-14)).any())
    # Half of the smallest is a tie, which goes to zero; anything more is the smallest.
    x[:, 0], w[:, :] = 2.0**-12, 0
    w[0] = 2.0**-13 * torch.tensor([1.0, 1 + 2.0**-10, 2.0, 3.0, -1.0, -1 - 2.0**-10, -2.0, -3.0])
    assert torch.equal(compiled.mm(x, w), SMALLEST * torch.tensor([0.0, 1, 1, 2, 0, -1, -1, -2]).expand(32, 8))


def exact_layers(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What fp16 hardware computes for ``layers``: the result, and the gradients for the tangent ``g``."""
    hidden = product(x, w1.t(), b1)
    read = hidden.relu() * 1.5
    inner = torch.where(hidden > 0, product(g, w2) * 1.5, 0.0)
    gradients = {"x": accumulated(inner, w1), "w1": accumulated(inner.t(), x), "b1": inner.sum(0)}
    gradients["w2"] = accumulated(g.t(), read)
    return product(read, w2.t()), gradients


def small_integers(x_bits: int, w1_bits: int, w2_bits: int, g_bits: int) -> tuple[list[Tensor], Tensor]:
    """Arguments of ``layers`` and a tangent, with results in fp16's range."""
    x, w1, b1 = integers(4, 4, bits=x_bits), integers(6, 4, bits=w1_bits), integers(6, bits=x_bits)
    w2, g = integers(4, 6, bits=w2_bits), integers(4, 4, bits=g_bits, seed=1)
    return [x / 2**6, w1 / 2**2, b1 / 2**8, w2 / 2**4], g / 2**4


@pytest.mark.inductor
@pytest.mark.parametrize("bits", [(12, 2, 3, 4), (3, 3, 12, 3)])
def test_two_layers_and_their_gradients_are_bitwise(compiled: Compiled, bits: tuple[int, int, int, int]) -> None:
    values, g = small_integers(*bits)
    y, gradients = exact_layers(*values, g)
    assert same(compiled.layers(*values), y)
    found = dict(zip(gradients, compiled.layers_gradients(values, g), strict=True))
    assert [name for name, truth in gradients.items() if not same(found[name], truth)] == []
    assert not torch.equal(y, layers(*(value.double() for value in values)))


@pytest.mark.inductor
def test_an_overflow_between_two_layers_is_not_undone(compiled: Compiled) -> None:
    values, g = small_integers(3, 3, 3, 3)
    x, w1, b1, w2 = values
    w2 /= 2**6
    x[:, :2], x[:, 2:] = 1.0, 0.0
    b1.zero_()
    # Twice these: beyond range, far below it, the largest number (beyond range times 1.5), the tie, two that fit.
    w1[:] = torch.tensor([40000.0, -40000.0, 32752.0, 32760.0, 640.0, -64.0])[:, None]
    assert (layers(*values).abs() < LARGEST / 8).all()  # without rounding nothing is beyond range at the end
    y, gradients = exact_layers(*values, g)
    assert not torch.isfinite(y).any()
    assert same(compiled.layers(*values), y)
    found = dict(zip(gradients, compiled.layers_gradients(values, g), strict=True))
    assert [name for name, truth in gradients.items() if not same(found[name], truth)] == []


@pytest.mark.inductor
def test_an_overflow_to_minus_infinity_is_zero_behind_relu(compiled: Compiled) -> None:
    values, g = small_integers(3, 3, 3, 3)
    x, w1, b1, _ = values
    x[:], w1[:], b1[:] = 1.0, -40000.0, 0.0
    assert torch.equal(compiled.layers(*values), torch.zeros(4, 4))
    for gradient in compiled.layers_gradients(values, g):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.inductor
def test_a_model_with_a_loss_scale_is_bitwise_and_keeps_small_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4, bias=False))
    x, g = integers(4, 4, bits=6) / 8, integers(4, 4, bits=3) * 2.0**-29
    with torch.no_grad():
        for parameter, bits in zip(model.parameters(), (5, 6, 5), strict=True):
            parameter.copy_(integers(*parameter.shape, bits=bits) / 4)
    first, bias, second = (parameter.detach() for parameter in model.parameters())
    y = torch.compile(model, backend="mixprec", options={"dtype": "fp16", "loss_scale": 2.0**14})(x)
    y.backward(g)
    hidden = product(x, first.t(), bias)
    scaled = g * 2.0**14
    inner = torch.where(hidden > 0, product(scaled, second), 0.0)
    assert same(y.detach(), product(hidden.relu(), second.t()))
    truths = [accumulated(inner.t(), x), inner.sum(0), accumulated(scaled.t(), hidden.relu())]
    for parameter, truth in zip(model.parameters(), truths, strict=True):
        assert same(parameter.grad, truth / 2**14)
        assert bool(parameter.grad.any())
    # Unscaled, such a gradient is nothing in fp16.
    assert not fp16(g).any()
