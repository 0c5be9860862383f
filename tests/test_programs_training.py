"""Training goes where fp32 training goes, and a fault in one pass is seen."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from benchmarks.models import GPT
from mpcompile.passes import bias_gradient, casts, edit
from tests.test_programs import BOUND, error, in_fp64, low_matmuls, mixprec, step

BAND = 0.03
"""Largest difference of two loss curves, relative to the first loss."""


def train(call: Callable[..., Tensor], model: nn.Module, batches: list[Any]) -> list[float]:
    """The losses of one AdamW step on each batch; ``call`` returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = call(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def furthest(losses: list[float], truth: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, truth, strict=True)) / truth[0]


class Regression(nn.Module):
    """A small MLP with its loss."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


def regression_batches(count: int = 50) -> list[tuple[Tensor, Tensor]]:
    inputs = [torch.randn(64, 8) for _ in range(count)]
    return [(x, x[:, :1] * x[:, 1:2] + 1) for x in inputs]


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_losses_of_fifty_steps_follow_fp64(kind: str) -> None:
    if kind == "mlp":
        model, batches = Regression(), regression_batches()
    else:
        model, batches = GPT(16, 32, 1, 8), [(torch.arange(8).repeat(4, 1),)] * 50
    exact = in_fp64(model)
    truth = train(exact, exact, [tuple(map(in_fp64, batch)) for batch in batches])
    compiled = mixprec(model)
    losses = train(compiled, model, batches)
    assert truth[-1] < 0.95 * truth[0]  # something was learned
    assert furthest(losses, truth) < BAND
    assert low_matmuls(compiled)[0] >= 3


def regression_error() -> float:
    """Gradient error of one step of the MLP, whose biases stand for the sums that must stay in fp32."""
    torch.manual_seed(0)
    model, batch = Regression(), regression_batches(1)[0]
    exact = in_fp64(model)
    truth = step(exact, exact, [in_fp64(x) for x in batch])
    torch._dynamo.reset()
    return error(step(mixprec(model), model, batch).gradients, truth.gradients)


def test_cast_to_a_coarser_type_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert regression_error() < BOUND

    def coarser(source: fx.Node, dtype: torch.dtype, like: fx.Node | None = None) -> fx.Node:
        if dtype is not torch.bfloat16:
            return edit.insert_cast(source, dtype, like)
        eight_bits = edit.insert_cast(source, torch.float8_e5m2, like)
        return edit.insert_cast(eight_bits, dtype, like)

    monkeypatch.setattr(casts, "insert_cast", coarser)
    assert regression_error() > BOUND


class Convolution(nn.Module):
    """One convolution whose bias gradient sums many equal terms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mul(1 / 3)


def bias_error() -> float:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Convolution()
    mixprec(model)(torch.randn(4, 2, 64, 64)).sum().backward()
    return error([model.layer.bias.grad], [torch.full((2,), 4 * 64 * 64 / 3)])


def test_bias_gradient_summed_in_low_precision_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bias_error() < 1e-5
    assert casts.keep_bias_gradient is bias_gradient.keep_bias_gradient
    monkeypatch.setattr(casts, "keep_bias_gradient", lambda node: None)
    assert bias_error() > 1e-3


def test_result_that_is_not_widened_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "_widen", lambda result: None)
    with pytest.raises(Exception, match=r"insert_casts changed output 0 from torch.float32"):
        mixprec(nn.Linear(8, 8).forward)(torch.randn(4, 8))


def test_training_goes_on_from_a_saved_state() -> None:
    batches = regression_batches(6)
    model = Regression()
    before = {name: (p, p.dtype) for name, p in model.named_parameters()}
    compiled = mixprec(model)
    train(compiled, model, batches[:3])
    saved = copy.deepcopy(model.state_dict())
    assert list(saved) == list(before)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    for name, parameter in model.named_parameters():
        assert (parameter, parameter.dtype) == before[name] or parameter is before[name][0]
    expected = train(compiled, model, batches[3:])

    resumed = Regression()
    resumed.load_state_dict(saved)
    assert train(mixprec(resumed), resumed, batches[3:]) == expected


def test_weights_from_outside_are_picked_up() -> None:
    model, other, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(4, 8)
    compiled = mixprec(model)
    old = compiled(x).detach()
    with torch.no_grad():
        assert error([compiled(x)], [old]) < 1e-6
        model.load_state_dict(other.state_dict(), assign=True)
        assert error([compiled(x)], [other(x)]) < BOUND
        model.load_state_dict({name: value + 1 for name, value in other.state_dict().items()})
        # Assigned parameters are the other model's own.
        assert error([compiled(x)], [other(x)]) < BOUND
        assert error([other(x)], [old]) > 5 * BOUND


def test_moving_average_swapped_in_and_out() -> None:
    model, x = Regression().layers, torch.randn(16, 8)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    compiled = mixprec(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    trained, own = copy.deepcopy(model.state_dict()), compiled(x).detach()
    model.load_state_dict(average.module.state_dict())
    swapped = compiled(x).detach()
    assert error([swapped], [in_fp64(average.module)(x.double()).detach()]) < BOUND
    model.load_state_dict(trained)
    assert torch.equal(compiled(x), own)
    assert error([swapped], [own]) > 5 * BOUND  # the two models differ enough to be told apart
