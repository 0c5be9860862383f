"""Models in training, optimizers and ways to overflow, for the tests of optimizer steps."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mpcompile
from mpcompile import Runtime
from tests.test_programs import mixprec

SCALE = 1024.0
HUGE = 1e30
"""A factor on the loss with which gradients are finite in fp32 and infinite in fp16."""

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
}


class Net(nn.Module):
    """Two matmuls, so that a gradient passes through fp16 on its way to the first."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(3, width)
        self.down = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@dataclass
class Training:
    """A compiled model in training."""

    model: nn.Module
    compiled: Any
    optimizer: Optimizer
    runtime: Runtime

    def backward(self, factor: float = 1.0, seed: int = 0) -> None:
        """Backward of one batch."""
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        (self.compiled(x).square().mean() * factor).backward()

    def step(self, factor: float = 1.0, seed: int = 0) -> None:
        """One whole step of the ordinary loop."""
        self.optimizer.zero_grad()
        self.backward(factor, seed)
        self.optimizer.step()

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def training(
    make: Callable[[Any], Optimizer] = OPTIMIZERS["sgd"], model: nn.Module | None = None, **options: Any
) -> Training:
    model = Net() if model is None else model
    compiled = mixprec(model, **{"dtype": "fp16", "loss_scale": {"init_scale": SCALE}, **options})
    return Training(model, compiled, make(model.parameters()), mpcompile.runtime(compiled))


def bits(value: Any) -> Any:
    """The value, where it is a tensor with its dtype, shape and every bit."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    return value


def everything(optimizer: Optimizer) -> Any:
    """Every bit that a step may change: parameters, optimizer state, step counts, settings of the groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [{key: bits(value) for key, value in optimizer.state.get(p, {}).items()} for p in parameters]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return [bits(p) for p in parameters], state, len(optimizer.state), copy.deepcopy(groups)


def copy_gradients(t: Training, other: Optimizer) -> None:
    """Give the gradients of ``t`` to the parameters of an optimizer of a copy of its model."""
    for parameter, gradient in zip(other.param_groups[0]["params"], t.gradients, strict=True):
        parameter.grad = gradient.clone()


def loss_overflows(t: Training) -> None:
    t.backward(HUGE)
    assert not all(gradient.isfinite().all() for gradient in t.gradients)


def infinity_in_one_gradient(t: Training) -> None:
    t.backward()
    t.gradients[-1].view(-1)[0] = float("inf")


def nan_in_one_gradient(t: Training) -> None:
    t.backward()
    t.gradients[0].view(-1)[-1] = float("nan")


def minus_infinity_everywhere(t: Training) -> None:
    t.backward()
    for gradient in t.gradients:
        gradient.fill_(-float("inf"))


def hidden_by_nan_to_num(t: Training) -> None:
    t.backward(HUGE)
    for gradient in t.gradients:
        gradient.nan_to_num_(0.5, 0.5, 0.5)


def hidden_by_clipping(t: Training) -> None:
    t.backward(HUGE)
    nn.utils.clip_grad_value_(t.model.parameters(), 0.1)
    for gradient in t.gradients:
        gradient.nan_to_num_(0.1)  # infinity times the zero of a relu is NaN, which clipping leaves


def hidden_by_new_gradients(t: Training) -> None:
    t.backward(HUGE)
    for parameter in t.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def hidden_by_a_later_clean_backward(t: Training) -> None:
    hidden_by_nan_to_num(t)
    t.backward()


OVERFLOWS = [
    loss_overflows,
    infinity_in_one_gradient,
    nan_in_one_gradient,
    minus_infinity_everywhere,
    hidden_by_nan_to_num,
    hidden_by_clipping,
    hidden_by_new_gradients,
    hidden_by_a_later_clean_backward,
]


def assert_every_overflow_is_skipped(t: Training, name: str) -> None:
    """None of ``OVERFLOWS`` changes a bit, and each halves the scale."""
    before = everything(t.optimizer)
    for count, overflow in enumerate(OVERFLOWS, 1):
        t.optimizer.zero_grad()
        overflow(t)
        t.optimizer.step()
        assert everything(t.optimizer) == before, (name, overflow)
        assert (t.runtime.skipped_steps, t.runtime.scale) == (count, SCALE / 2**count), (name, overflow)


class CallsSuper(torch.optim.AdamW):
    """Does something of its own around the step of its base class."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)
        return result
