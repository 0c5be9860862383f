"""Programs with control flow, several graphs, dynamic sizes, or a mode that changes."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpcompile
from tests.test_programs import (
    BOUND,
    assert_close,
    check,
    error,
    fp32_matmuls,
    in_fp32,
    in_fp64,
    low_matmuls,
    mixprec,
    step,
)


def mlp(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))


class Residual(nn.Module):
    """x + MLP(norm(x)), a building block of the programs below."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(8), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x))


def test_changing_batch_compiles_once() -> None:
    model = Residual()
    exact = in_fp64(model)
    compiled = mixprec(model, dynamic=True)
    for batch in (3, 5, 64, 2):
        x = torch.randn(batch, 8, requires_grad=True)
        assert_close(step(compiled, model, [x]), step(exact, exact, [in_fp64(x)]))
    assert len(mpcompile.reports(compiled)) == 1
    assert low_matmuls(compiled) == (2, 4)
    # Dynamo compiles a size of 1 on its own; on a CPU its products are no matmuls, and stay in fp32.
    x = torch.randn(1, 8, requires_grad=True)
    assert_close(step(compiled, model, [x]), step(exact, exact, [in_fp64(x)]))
    assert len(mpcompile.reports(compiled)) == 2


class Broken(nn.Module):
    """A graph break in the middle, after which a dtype is read in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Residual(), Residual()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        assert x.dtype in (torch.float32, torch.float64)
        return self.second(x.to(self.second.norm.weight.dtype))


def test_graph_break() -> None:
    compiled = check(Broken(), torch.randn(4, 8, requires_grad=True), low=(4, 8))
    assert len(mpcompile.reports(compiled)) == 2
    assert {node.module.split(".")[0] for r in mpcompile.reports(compiled) for node in r.matmuls()} == {
        "first",
        "second",
    }


class Branches(nn.Module):
    """Takes one of two layers by a value that only a run knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if x.sum().item() > 0 else x * 2


def test_branch_on_an_item() -> None:
    model = Branches()
    exact = in_fp64(model)
    compiled = mixprec(model)
    x = torch.randn(4, 8)
    sign = model.first(x).sum().sign().item()
    with torch.no_grad():
        model.first.bias += 10 * sign
        exact.first.bias += 10 * sign
    for change in (0, -20 * sign):
        with torch.no_grad():
            model.first.bias += change
            exact.first.bias += change
        assert_close(step(compiled, model, [x]), step(exact, exact, [in_fp64(x)]))
    taken = [parameter.grad is None for parameter in model.second.parameters()]
    assert taken == [sign > 0] * 2


class Condition(nn.Module):
    """``torch.cond`` between two matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        def positive(x: Tensor) -> Tensor:
            return self.layer(x).sin()

        def negative(x: Tensor) -> Tensor:
            return self.layer(x) @ self.layer.weight

        return torch.cond(x.sum() > 0, positive, negative, (x,))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_both_branches_of_cond_run_low(sign: float) -> None:
    x = (torch.randn(4, 8).abs() * sign).requires_grad_()
    compiled = check(Condition(), x, low=(3, 8))
    assert fp32_matmuls(compiled) == (0, 0)


def test_gan_with_two_optimizers() -> None:
    generator, critic = mlp(), mlp()
    exact = [in_fp64(generator), in_fp64(critic)]
    noise = torch.randn(16, 8)

    def play(make: Any, draw: Any, models: list[nn.Module], z: Tensor) -> list[Tensor]:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for _ in range(3):
            fake = make(z)
            score = draw(fake)
            optimizers[0].zero_grad()
            score.mean().backward(retain_graph=True)
            optimizers[1].zero_grad()  # the critic forgets what the generator's loss left
            (score.square().mean() - score.mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [p.detach() for model in models for p in model.parameters()]

    before = copy.deepcopy([generator, critic])
    compiled = [mixprec(generator), mixprec(critic)]
    trained = play(*compiled, [generator, critic], noise)
    truth = play(*exact, exact, in_fp64(noise))
    start = [p.detach() for model in before for p in model.parameters()]
    moved = [t - s.double() for t, s in zip(truth, start, strict=True)]
    assert error([t - s for t, s in zip(trained, start, strict=True)], moved) < BOUND
    assert [low_matmuls(model) for model in compiled] == [(2, 3), (2, 4)]


class Checkpointed(nn.Module):
    """Two checkpointed blocks with dropout."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            x = F.dropout(x, 0.5, training=True)
        return x


@pytest.mark.parametrize("recompute", [True, False])
def test_dropout_draws_the_masks_of_fp32(recompute: bool) -> None:
    model, x = Checkpointed(recompute), torch.randn(8, 8, requires_grad=True)
    truth = step(in_fp32(model), model, [x], seed=3)
    torch._dynamo.reset()
    compiled = mixprec(model)
    mixed = step(compiled, model, [x], seed=3)
    assert torch.equal(mixed.outputs[0] == 0, truth.outputs[0] == 0)
    assert 0 < int((truth.outputs[0] == 0).sum()) < x.numel()
    assert_close(mixed, truth)
    forward, backward = low_matmuls(compiled)
    assert (forward, backward >= 8) == (4, True)
    assert fp32_matmuls(compiled) == (0, 0)


def test_batch_norm_through_train_eval_train() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(inplace=True), nn.Conv2d(4, 2, 3))
    exact, compiled = in_fp64(model), mixprec(model)
    for training in (True, False, True):
        model.train(training)
        exact.train(training)
        x = torch.randn(4, 3, 8, 8)
        assert_close(step(compiled, model, [x]), step(exact, exact, [in_fp64(x)]), 0.03)
    assert model[1].num_batches_tracked == 2
    assert model[1].running_var.dtype == torch.float32


class NoGradInside(nn.Module):
    """A part without gradient: its layer gets none, what follows does."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.frozen(x)
        return self.trained(x)


def test_no_grad_inside() -> None:
    model = NoGradInside()
    check(model, torch.randn(4, 8), low=(2, 1))
    assert model.frozen.weight.grad is None
    assert model.trained.weight.grad is not None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_first_and_training_afterwards(context: Any) -> None:
    model, x = mlp(), torch.randn(4, 8)
    compiled = mixprec(model)
    with context():
        assert error([compiled(x)], [in_fp64(model)(x.double())]) < BOUND
    assert low_matmuls(compiled) == (2, 0)
    exact = in_fp64(model)
    assert_close(step(compiled, model, [x]), step(exact, exact, [in_fp64(x)]))
    assert all(parameter.grad is not None for parameter in model.parameters())


class Tagger(nn.Module):
    """An LSTM between a captured block and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.recurrent, self.head = Residual(), nn.LSTM(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.block(x))[0])


def test_recurrent_modules_warn_and_stay_right() -> None:
    with pytest.warns(mpcompile.MixprecWarning, match="'recurrent' run in float32"):
        check(Tagger(), torch.randn(2, 5, 8), low=(2, 4))


def test_transformer_encoder_plans_the_same_in_training_and_evaluation() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = torch.randn(2, 5, 16)
    plans = []
    for training in (True, False):
        torch._dynamo.reset()
        compiled = mixprec(model.train(training))
        exact = in_fp64(model)
        assert_close(step(compiled, model, [x]), step(exact, exact, [in_fp64(x)]))
        (report,) = mpcompile.reports(compiled)
        plans.append([(n.op, n.inputs, n.direction, n.reason) for n in report.matmuls()])
    assert plans[0] == plans[1]
    assert len(plans[0]) > 10
