"""Models with 16-bit parameters, optimizers of them, and their fp32 twins, for the tests of master weights."""

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import mpcompile
from mpcompile import MasterWeights
from mpcompile.execution.stand_in import parameters_of

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


def train_both(
    model: Callable[..., Any],
    optimizer: Optimizer,
    reference: Optimizer,
    seeds: Iterable[int],
    dtype: torch.dtype = BF16,
) -> None:
    """One step for each seed, and one of ``reference``, whose parameters are an fp32 twin, with the same gradients."""
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, dtype, (seed,))
        give_gradients(parameters_of(reference), parameters_of(optimizer))
        optimizer.step()
        reference.step()


def assert_follow(masters: MasterWeights, parameters: Sequence[Tensor], twin: Sequence[Tensor]) -> None:
    """The masters are the twin, and the parameters are the masters rounded."""
    assert_same(list(masters.values()), values(twin))
    assert_same(values(parameters), [own.detach().to(p.dtype) for own, p in zip(twin, parameters, strict=True)])


def assert_fp32_masters(state: dict[str, Any], masters: MasterWeights) -> None:
    assert_same({name: state[name] for name in masters}, dict(masters))
    assert {value.dtype for value in state.values()} == {FP32}
