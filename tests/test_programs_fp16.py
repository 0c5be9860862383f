"""Whole programs in fp16: gradients are those of fp64, and no bit of them depends on the loss scale."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import mpcompile
from tests.helpers import relative_error
from tests.test_programs import Step, in_fp64, mixprec, step

BOUND = 2.0**-8
"""Relative error allowed to one output or gradient of a few fp16 layers: eight roundings, each by up to 2^-11."""
SCALES = (2.0**4, 2.0**12)
TOO_LARGE = 2.0**24
"""A loss scale, the largest there is, with which the gradients of every program here overflow."""


@pytest.fixture(autouse=True)
def _nothing_counted() -> None:
    counters.clear()


def fp16(model: Callable[..., Any], scale: Any = "auto", dynamic: bool | None = None, **options: Any) -> Any:
    """``model`` compiled in fp16 with a loss scale."""
    return mixprec(model, dynamic, dtype="fp16", loss_scale=scale, **options)


def set_scale(compiled: Any, scale: float) -> None:
    """Move the dynamic loss scale of a compiled model."""
    runtime = mpcompile.runtime(compiled)
    runtime.load_state_dict({**runtime.state_dict(), "scale": scale})
    assert runtime.scale == scale


def small(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with gradients between about 2^-17 and 2^3: so both of ``SCALES`` keep them well within fp16's range."""
    return lambda *inputs: tree_map(lambda x: x / 4 if _is_differentiable(x) else x, call(*inputs))


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def graphs() -> int:
    """How many graphs were compiled."""
    return int(counters["stats"]["unique_graphs"])


def assert_close(found: Step, truth: Step, bound: float = BOUND) -> None:
    """Every output, gradient and buffer by itself is within ``bound`` of the truth."""
    for mine, exact in (
        (found.outputs, truth.outputs),
        (found.gradients, truth.gradients),
        (found.buffers, truth.buffers),
    ):
        assert [value.shape for value in mine] == [value.shape for value in exact]
        for one, other in zip(mine, exact, strict=True):
            assert relative_error(one, other) < bound


def tensors(step: Step) -> list[Tensor]:
    return [*step.outputs, *step.gradients, *step.buffers]


def check_scales(
    model: Callable[..., Any],
    *inputs: Any,
    bound: float = BOUND,
    around: Callable[[Any], Callable[..., Any]] = lambda call: call,
) -> Any:
    """Compare with fp64 and one loss scale with another; ``around`` is what the user's program adds to the model."""
    exact = in_fp64(model)
    truth = step(small(around(exact)), exact, tree_map(in_fp64, inputs))
    compiled = fp16(model)
    before = copy.deepcopy(model.state_dict()) if isinstance(model, nn.Module) else {}
    found, compiled_graphs = [], 0
    for scale in (*SCALES, TOO_LARGE):
        if before:
            model.load_state_dict(before)
        set_scale(compiled, scale)
        found.append(step(small(around(compiled)), model, inputs))
        compiled_graphs = compiled_graphs or graphs()
    assert graphs() == compiled_graphs > 0
    one, other, overflowed = found
    assert_close(one, truth, bound)
    assert all(map(torch.equal, tensors(one), tensors(other)))
    # The scale was there: with too large a one backward overflows, and forward does not notice.
    assert not all(bool(value.isfinite().all()) for value in overflowed.gradients)
    assert all(map(torch.equal, one.outputs, overflowed.outputs))
    return compiled


class Two(nn.Module):
    """Two layers to build programs with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).relu())


class Broken(Two):
    """A graph break between the layers: what leaves one backward enters the other."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x)


class Tied(Two):
    """One weight in three places."""

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.first(x).tanh()) @ self.first.weight


class Checkpointed(Two):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Views(Two):
    """Outputs that are views of one another and of an input."""

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        return y.view(-1), y.t(), x.view(-1), x[1:], y, self.first.weight


class MutatedBuffer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.total.add_(x.detach().mean(0))
        return self.second(x.mul_(2) + self.total)


class WithoutGradient(Two):
    """Among the outputs are some that have no gradient: detached, of integers, of booleans."""

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        return y.detach() * 2, y, y.argmax(-1), y > 0, self.second(y).sum()


class Condition(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return torch.cond(y.sum() > 0, lambda y: self.second(y).sin(), lambda y: self.second(y).cos(), (y,))


class Spectral(Two):
    """Complex numbers by an FFT."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.first(x)) * torch.polar(torch.ones_like(x[:, :5]), x[:, :5])
        return self.second(torch.fft.irfft(spectrum, n=8)) + spectrum.abs().sum()


class Solved(Two):
    """Linear algebra that a backward has for the matrix as well as for the right-hand side."""

    def forward(self, x: Tensor) -> Tensor:
        matrix = 3 * torch.eye(8, dtype=x.dtype) + self.second.weight
        return torch.linalg.solve(matrix, self.first(x).t()) + torch.linalg.cholesky(matrix @ matrix.t())[:, :4]


class Wide(Two):
    """fp64 in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x).double() * 3).sin().to(x.dtype))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3, padding=1, bias=False)
        self.batch_norm, self.group_norm = nn.BatchNorm1d(8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(torch.arange(16) % 9).view(2, 8, 8) + x[:2, None]
        return F.max_pool1d(self.group_norm(self.batch_norm(self.layer(x)).relu()), 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x[None], x[None], x[None])


class Scattered(Two):
    """Writes into places, sorts, joins, sums up."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        placed = torch.zeros_like(y).index_add(0, torch.tensor([0, 2, 0]), y[:3])
        placed[1] = y[3]
        placed = placed.scatter_add(1, torch.arange(8).expand(4, 8) // 2, y)
        return self.second(torch.cat([placed, y.sort(-1).values]).cumsum(0)).logsumexp(-1) + y.amax()


class Frozen(Two):
    """Only some parameters are trained, one of them on top of a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.adapter = nn.Parameter(torch.randn(8, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x) + x @ self.adapter @ self.adapter.t()).relu())


PROGRAMS = [
    Two,
    Broken,
    Tied,
    Checkpointed,
    Views,
    MutatedBuffer,
    WithoutGradient,
    Condition,
    Spectral,
    Solved,
    Wide,
    Convolutional,
    Attention,
    Scattered,
    Frozen,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_those_of_fp64_under_any_scale(program: type[nn.Module]) -> None:
    check_scales(program(), torch.randn(4, 8, requires_grad=True))
