"""Operations without a good 16-bit kernel, and the shapes and kinds of those that have one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from tests.test_programs import BOUND, check, error, fp32_matmuls, low_matmuls, matmuls, mixprec


class Between(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(8, 8), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


def dtypes(compiled: Any) -> set[str]:
    """Every dtype of the rewritten graphs."""
    nodes = [node for report in mpcompile.reports(compiled) for node in report.nodes]
    return {dtype for node in nodes for dtype in (*node.inputs, node.output)}


FOURIER = {
    "rfft": lambda x: torch.fft.irfft(torch.fft.rfft(x, norm="ortho") * 2, n=8, norm="ortho"),
    "fft2": lambda x: torch.view_as_real(torch.fft.fft2(x, norm="ortho")).sum(-1),
    "stft": lambda x: torch.view_as_real(
        torch.stft(x, 8, hop_length=4, window=torch.ones(8), center=False, return_complex=True)
    ).flatten(1)[:, :8],
}


@pytest.mark.parametrize("name", FOURIER)
def test_fourier_transforms_are_complex64(name: str) -> None:
    compiled = check(Between(FOURIER[name]), torch.randn(4, 8), low=(2, 3))
    assert "complex64" in dtypes(compiled)
    assert "complex32" not in dtypes(compiled)


def _square(x: Tensor) -> Tensor:
    """A well-conditioned symmetric matrix made of x [8, 8]."""
    return (x + x.t()) / 8 + 3 * torch.eye(8, dtype=x.dtype)


def _lower(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(_square(x))


LINALG = {
    "solve": lambda x: torch.linalg.solve(_square(x), x),
    "inv": lambda x: torch.linalg.inv(_square(x)),
    "svd": lambda x: torch.linalg.svdvals(_square(x) + torch.arange(8).diag()).diag(),
    "eigh": lambda x: torch.linalg.eigvalsh(_square(x) + torch.arange(8).diag()).diag(),
    "qr": lambda x: torch.linalg.qr(_square(x))[1],
    "cholesky": _lower,
    "slogdet": lambda x: torch.linalg.slogdet(_square(x))[1] * x,
    "matrix_exp": lambda x: torch.linalg.matrix_exp(x / 8),
}


@pytest.mark.parametrize("name", LINALG)
def test_factorisations_compute_in_fp32(name: str) -> None:
    model, x = Between(LINALG[name]), torch.randn(8, 8)
    compiled = mixprec(model)
    found, exact = compiled(x), model.double()
    assert error([found.detach()], [exact(x.double()).detach()]) < BOUND
    found.square().mean().backward()
    mixed = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    exact(x.double()).square().mean().backward()
    assert error(mixed, [parameter.grad for parameter in model.parameters()]) < 0.03
    nodes = [node for report in mpcompile.reports(compiled) for node in report.nodes if "linalg" in node.op]
    assert nodes
    assert {dtype for node in nodes for dtype in node.inputs} <= {"float32", "int32"}  # pivots are integers


IMAGES = {
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "grid_sample": lambda x: F.grid_sample(
        x,
        F.affine_grid(torch.eye(2, 3, dtype=x.dtype)[None] * 0.9, [1, *x.shape[1:]], align_corners=False),
        align_corners=False,
    ),
    "pooling": lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 4),
}


class Images(nn.Module):
    """Two convolutions around a resampling."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


@pytest.mark.parametrize("name", IMAGES)
def test_resampling(name: str) -> None:
    # Max pooling passes the gradient to the largest of four; rounding moves it where two are nearly equal.
    bound = 0.2 if name == "pooling" else BOUND
    check(Images(IMAGES[name]), torch.randn(1, 2, 8, 8), low=(2, 2), bound=bound)


CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(2, 3, 3), (2, 2, 11)),
    "3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1), (2, 2, 5, 5)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), (2, 4, 5, 5)),
    "dilated": (lambda: nn.Conv2d(2, 3, 3, dilation=2, padding="same"), (2, 2, 7, 7)),
    "unbatched": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str) -> None:
    make, shape = CONVOLUTIONS[name]
    compiled = check(make(), torch.randn(shape, requires_grad=True), low=(1, 1))
    assert fp32_matmuls(compiled) == (0, 0)


def test_channels_last_stays_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    compiled = check(model, x, low=(2, 2))
    assert compiled(x).is_contiguous(memory_format=torch.channels_last)


PRODUCTS = {
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (2, 3, 4), (2, 4, 5)),
    "einsum of three": (lambda a, b: torch.einsum("bij,bjk,bkl->bil", a, b, a.mT), (2, 3, 4), (2, 4, 4)),
    "baddbmm": (lambda a, b: torch.baddbmm(b[:, :1, :], a, b, alpha=0.5), (2, 3, 4), (2, 4, 5)),
    "addbmm": (lambda a, b: torch.addbmm(b[0, :3], a, b), (2, 3, 4), (2, 4, 5)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([1, 2], [1, 0])), (3, 4, 5), (5, 4, 2)),
    "broadcast": (lambda a, b: a @ b, (2, 1, 3, 4), (5, 4, 3)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    function, *shapes = PRODUCTS[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    products = 2 if name == "einsum of three" else 1
    check(function, *inputs, low=(products, 2 * products))


def test_bilinear_layer() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Bilinear(4, 5, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.head(self.layer(x, y))

    model, inputs = Pair(), (torch.randn(7, 4), torch.randn(7, 5))
    compiled = mixprec(model)
    compiled(*inputs).sum().backward()
    assert error([compiled(*inputs).detach()], [model.double()(*(x.double() for x in inputs)).detach()]) < BOUND
    assert low_matmuls(compiled)[0] >= 2


SHAPES = [(1, 7, 1), (1, 13, 5), (5, 13, 1), (7, 11, 13), (2, 1, 3), (0, 4, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.filterwarnings("ignore:No operation of this graph computes in 16 bits:UserWarning")
def test_odd_shapes(shape: tuple[int, int, int]) -> None:
    rows, depth, columns = shape
    model, x = nn.Linear(depth, columns), torch.randn(rows, depth, requires_grad=True)
    compiled = mixprec(model)
    y = compiled(x)
    y.sum().backward()
    assert (y.shape, y.dtype) == ((rows, columns), torch.float32)
    assert {g.dtype for g in (x.grad, model.weight.grad, model.bias.grad)} == {torch.float32}
    if rows:
        assert error([y.detach()], [F.linear(x.double(), model.weight.double(), model.bias.double()).detach()]) < BOUND
        assert error([x.grad], [model.weight.sum(0).expand(rows, -1).detach()]) < BOUND
    assert torch.equal(model.bias.grad, torch.full((columns,), float(rows)))
    assert error([model.weight.grad + 1], [x.detach().sum(0).expand(columns, -1) + 1]) < BOUND


class Cells(nn.Module):
    """An LSTM and a GRU, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(4, 6), nn.GRUCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        state = h = None
        for t in range(2):
            state = self.lstm(x[t], state)
            h = self.gru(state[0], h)
        return torch.cat((h, state[1]), 1)


def test_recurrent_cells_keep_their_state_in_fp32() -> None:
    compiled = check(Cells(), torch.randn(2, 3, 4, requires_grad=True), low=(8, 14))
    assert fp32_matmuls(compiled) == (0, 0)
    nodes = [node for report in mpcompile.reports(compiled) for node in report.nodes]
    gates = [node for node in nodes if node.op in ("aten.sigmoid.default", "aten.tanh.default")]
    assert len(gates) > 8
    assert {dtype for node in gates for dtype in node.inputs} == {"float32"}


def test_multi_head_attention_module() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.attention(x, y, y, need_weights=True)

    compiled = check(Attends(), torch.randn(2, 3, 8), torch.randn(2, 5, 8), low=(5, 8))
    assert fp32_matmuls(compiled) == (0, 0)
    assert all(node.precision == "low" for node in matmuls(compiled))
