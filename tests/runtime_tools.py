"""A compiled model in training, for the tests of ``mpcompile.runtime``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mpcompile
from mpcompile import Runtime
from tests.test_programs import mixprec

HUGE = 1e30
"""A factor on the loss with which gradients are finite in fp32 and infinite in fp16."""
CLEAN, OVERFLOW = 1.0, HUGE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Training:
    """A compiled model in training."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.model = Net() if model is None else model
        options = {"dtype": "fp16", "loss_scale": {"init_scale": 1024.0}, **options}
        self.compiled = mixprec(self.model, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    @property
    def runtime(self) -> Runtime:
        return mpcompile.runtime(self.compiled)

    def step(self, factor: float = 1.0) -> float:
        """One step of the ordinary loop; returns the scale after it."""
        self.optimizer.zero_grad()
        (self.compiled(torch.ones(4, 3)).square().mean() * factor).backward()
        self.optimizer.step()
        return self.runtime.scale

    def steps(self, factors: Sequence[float]) -> list[float]:
        return [self.step(factor) for factor in factors]


def judged(runtime: Runtime, *bad: bool, elsewhere: bool = False) -> None:
    """Tell a runtime of a step of parameters ``p0``, ``p1``, ...; ``elsewhere``: another process overflowed."""
    overflowed = torch.tensor(any(bad) or elsewhere)
    runtime.judged(tuple(f"p{i}" for i in range(len(bad))), torch.tensor(bad), overflowed, overflowed)
    runtime.warn()
