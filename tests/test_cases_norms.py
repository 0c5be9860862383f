"""Normalisations: exact statistics, no casts of their own, the same written by hand."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from benchmarks.models import RMSNorm
from tests.test_programs import BOUND, assert_close, check, error, in_fp64, low_matmuls, mixprec, step


class HandLayerNorm(nn.Module):
    """Mean and variance written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() + self.bias


class T5Norm(nn.Module):
    """Returns to the weight's dtype, as many models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(self.weight.dtype)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(16),
    "rms": lambda: nn.RMSNorm(16),
    "group": lambda: nn.GroupNorm(4, 16),
    "batch": lambda: nn.BatchNorm1d(16),
    "layer by hand": lambda: HandLayerNorm(16),
    "rms by hand": lambda: RMSNorm(16),
    "rms to the weight's dtype": lambda: T5Norm(16),
}


class Normed(nn.Module):
    """Linear, norm, linear; returns the normalised value as well."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), norm, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))


@pytest.mark.parametrize("name", NORMS)
def test_norms_between_matmuls_cost_no_casts_of_their_own(name: str) -> None:
    compiled = check(Normed(NORMS[name]()), torch.randn(32, 8), low=(2, 3))
    (report,) = mpcompile.reports(compiled)
    narrowed = [cast for cast in report.casts if (cast.direction, cast.after) == ("forward", "bfloat16")]
    # The input, two weights and two biases, and the norm's result; the norm itself reads one widened matmul.
    assert len(narrowed) == 6
    statistics = [node for node in report.nodes if node.op_class == "fp32"]
    assert statistics
    assert not any("bfloat16" in node.inputs for node in statistics)


class Direct(nn.Module):
    """Normalises an input that is far from zero; a layer follows."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = norm, nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return self.layer(y), y


@pytest.mark.parametrize("name", ["layer", "batch", "layer by hand"])
def test_statistics_survive_a_large_mean(name: str) -> None:
    # In bf16 the values 999..1001 are one and the same.
    model, x = Direct(NORMS[name]()), 1000 + torch.randn(32, 16)
    compiled = mixprec(model)
    y = compiled(x)[1].detach()
    assert error([y], [in_fp64(model)(x.double())[1].detach()]) < 1e-3
    assert low_matmuls(compiled)[0] == 1


@pytest.mark.parametrize("kind", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal])
def test_parametrized_weights(kind: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(kind(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(16, 8)
    exact = in_fp64(model)
    compiled = mixprec(model)
    assert_close(step(compiled, model, [x]), step(exact, exact, [x.double()]), 0.03)
    assert low_matmuls(compiled)[0] >= 2
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_norm_that_feeds_a_norm_is_not_rounded() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.layer = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            once = self.first(x)
            return self.layer(once), self.second(once)

    model, x = Twice(), torch.randn(32, 16)
    found = mixprec(model)(x)[1].detach()
    # The second norm adds up what the first made, and its result leaves the graph: no rounding on the way.
    assert error([found], [in_fp64(model)(x.double())[1].detach()]) < 2 * BOUND
    assert found.dtype == torch.float32


def test_softmax_of_a_long_row_sums_to_one() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.value = nn.Linear(4, 2048), nn.Linear(2048, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            weights = F.softmax(self.layer(x), -1)
            return self.value(weights), weights

    weights = mixprec(Attends())(torch.randn(8, 4))[1]
    assert error([weights.sum(1).detach()], [torch.ones(8)]) < 1e-5


def test_logits_widened_by_the_model_are_not_cast_again() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 500, bias=False)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(self.layer(x).float(), target)

    compiled = mixprec(Head())
    loss = compiled(torch.randn(16, 8), torch.randint(0, 500, (16,)))
    loss.backward()
    (report,) = mpcompile.reports(compiled)
    assert low_matmuls(compiled) == (1, 1)
    # Forward: input and weight narrowed, logits widened once. Backward: the logits' gradient narrowed; the input and
    # it widened, as operands of the weight's gradient on a device without bfloat16.
    widened = [cast.value for cast in report.casts if cast.after == "float32"]
    assert len(set(widened)) == len(widened) == 3
    assert len(report.casts) == 6
