"""Models, their true gradients and the flags raised for them, for the tests of scaled graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpcompile import loss_scaling
from mpcompile.execution import watch as watching
from mpcompile.execution.scaled_graph import ScaledGraph
from tests.helpers import relative_error
from tests.test_programs import in_fp64, mixprec

SCALE = 1024.0
HUGE = 1e30
"""A factor on a gradient that is finite in fp32 and infinite in fp16."""
BOUND = 4 * 2.0**-11
"""Relative error allowed: two matmuls in a row, each of two operands rounded to fp16, err by at most 2^-11 each."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class WithView(Net):
    """Returns a view of its input as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x.view(-1)


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> list[ScaledGraph]:
    """Every scaled graph that is compiled from now on."""
    found: list[ScaledGraph] = []

    class Recorded(ScaledGraph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(loss_scaling, "ScaledGraph", Recorded)
    return found


def scaled(model: Callable[..., Any], **options: Any) -> Any:
    return mixprec(model, **{"dtype": "fp16", "loss_scale": {"init_scale": SCALE}, **options})


def overflowed(model: nn.Module) -> list[str]:
    """The names of the parameters that a flag is raised for."""
    names = []
    for name, parameter in model.named_parameters():
        for flags, slot in watching._watched[id(parameter)].flags():
            names += [name] if flags.raised([slot]).item() else []
    return names


def batch(size: int = 5, **options: Any) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(size), **options)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def true_gradients(model: nn.Module, loss: Callable[[Any], Tensor]) -> list[Tensor]:
    """Those of the model in fp64."""
    exact = in_fp64(model)
    exact.zero_grad()
    loss(exact).backward()
    return gradients(exact)


def assert_true(found: list[Tensor], truth: list[Tensor]) -> None:
    assert len(found) == len(truth) > 0
    for one, other in zip(found, truth, strict=True):
        assert one.dtype is torch.float32
        assert relative_error(one, other) < BOUND


def assert_same(found: list[Tensor], others: list[Tensor]) -> None:
    """Bit by bit."""
    assert len(found) == len(others) > 0
    assert all(map(torch.equal, found, others))
