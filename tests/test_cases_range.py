"""Constants, small denominators, long sums and large values come out as in fp32."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.test_programs import BOUND, check, error, in_fp64, low_matmuls, mixprec, step

LEAST = torch.finfo(torch.float32).min


class Masked(nn.Module):
    """Attention by hand with a fill value, in which a whole row may be masked."""

    def __init__(self, fill: float, how: str) -> None:
        super().__init__()
        self.fill, self.how = fill, how
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.how == "fill":
            return (q @ k.mT).masked_fill(masked, self.fill).softmax(-1) @ v
        mask = torch.zeros(masked.shape, dtype=x.dtype).masked_fill(masked, self.fill)
        if self.how == "add":
            return ((q @ k.mT) / 8**0.5 + mask).softmax(-1) @ v
        attn_mask = ~masked if self.how == "bool" else mask
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask)


@pytest.mark.parametrize("how", ["fill", "add", "float", "bool"])
@pytest.mark.parametrize("fill", [-1e9, LEAST])
def test_masks(how: str, fill: float) -> None:
    masked = torch.rand(5, 5) > 0.5
    masked[:, 0] = False
    if how in ("fill", "float") and fill == LEAST:
        masked[2] = True  # a row that sees nothing is the mean of the values, and never NaN
    compiled = check(
        Masked(fill, how), torch.randn(2, 5, 8), masked, low=(4, 4) if how in ("bool", "float") else (5, 7)
    )
    with torch.no_grad():
        assert torch.isfinite(compiled(torch.randn(2, 5, 8), masked)).all()


NORMALISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": lambda x: F.normalize(x, dim=1),
    "cosine": lambda x: F.cosine_similarity(x[:, None], x[None], dim=2),
    "by hand": lambda x: x / (x.square().sum(1, keepdim=True) + 1e-24).sqrt(),
    "layer norm": lambda x: F.layer_norm(x, (4,), eps=1e-12),
    "rms norm": lambda x: F.rms_norm(x, (4,), eps=1e-12),
}


class Normalised(nn.Module):
    """Normalises what a linear layer without bias makes of its input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.normalise = nn.Linear(8, 4, bias=False), NORMALISERS[how]

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(self.layer(x))


@pytest.mark.parametrize("how", NORMALISERS)
def test_zero_vectors_are_no_nan(how: str) -> None:
    model, x = Normalised(how), torch.randn(4, 8)
    x[1] = 0
    compiled = mixprec(model)
    found = compiled(x)
    found.square().sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(model.layer.weight.grad).all()
    assert found[1].abs().max() == 0 or how == "cosine"
    assert error([found.detach()], [in_fp64(model)(x.double()).detach()]) < BOUND
    assert low_matmuls(compiled)[0] == 1


def test_values_beyond_fp16_stay_finite() -> None:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.eye_(layer.weight)
    x = torch.full((2, 4), 70000.0, requires_grad=True)
    y = mixprec(layer)(x)
    y.sum().backward()
    assert error([y.detach()], [x.detach()]) < 2**-8
    assert torch.equal(x.grad, torch.ones(2, 4))


def test_small_gradients_do_not_vanish() -> None:
    model, x = nn.Linear(8, 4), torch.randn(16, 8)
    (mixprec(model)(x).sum() * 1e-9).backward()
    assert error([model.weight.grad], [x.sum(0).expand(4, -1) * 1e-9]) < BOUND
    assert torch.equal(model.bias.grad, torch.full((4,), 16.0) * 1e-9)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "cumsum": lambda x: x.cumsum(0)[-1],
    "norm": lambda x: x.norm(dim=0),
    "logsumexp": lambda x: x.logsumexp(0),
    "var": lambda x: x.var(0),
    "einsum to a row": lambda x: x.square().sum(0).sqrt(),
}


class Reduced(nn.Module):
    """A long reduction behind a layer that keeps its input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.reduce = nn.Linear(2, 2), REDUCTIONS[how]
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.layer(x))


@pytest.mark.parametrize("how", REDUCTIONS)
def test_long_reductions_accumulate_in_fp32(how: str) -> None:
    # The values are exact in bf16, so only the reduction can err.
    x = torch.randint(1, 4, (4096, 2)).float()
    model = Reduced(how)
    exact = in_fp64(model)
    compiled = mixprec(model)
    mixed, truth = step(compiled, model, [x]), step(exact, exact, [x.double()])
    assert error(mixed.outputs, truth.outputs) < 1e-5
    assert error(mixed.gradients, truth.gradients) < BOUND
    assert low_matmuls(compiled) == (1, 1)


class Counter(nn.Module):
    """Running sums in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.calls += 1
        self.total += torch.ones_like(y).sum(0)
        return y


def test_running_sums_do_not_stick() -> None:
    model = Counter()
    compiled = mixprec(model)
    for _ in range(400):
        compiled(torch.ones(2, 2))
    assert (float(model.calls), model.total.tolist()) == (400, [800, 800])


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid and bce": lambda y, t: F.binary_cross_entropy(y.sigmoid(), t),
    "bce with logits": lambda y, t: F.binary_cross_entropy_with_logits(y, t),
    "cross entropy": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
    "kl": lambda y, t: F.kl_div(y.log_softmax(1), t, reduction="batchmean"),
    "focal, by hand": lambda y, t: -(t * (1 - y.sigmoid()) ** 2 * F.logsigmoid(y)).mean(),
    "contrastive, by hand": lambda y, t: torch.log1p(torch.exp(-(y - t).pow(2).sum(1))).mean(),
    "huber": lambda y, t: F.huber_loss(y, t),
    "ce, by hand": lambda y, t: ((y.exp().sum(1)).log() - (y * t).sum(1)).mean(),
}


class Scored(nn.Module):
    """A layer and a loss inside the compiled model."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(8, 6), LOSSES[how]

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer(x)
        return self.loss(logits, target), logits.detach()


@pytest.mark.parametrize("how", LOSSES)
def test_losses_are_fp32(how: str) -> None:
    model, x, target = Scored(how), torch.randn(16, 8) * 3, torch.rand(16, 6).softmax(1)
    compiled = check(model, x, target, low=(1, 1))
    loss, logits = compiled(x, target)
    # Given the logits that came out, the loss has no error of its own.
    assert error([loss.detach()], [model.loss(logits.double(), target.double())]) < 1e-5


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_loss_outside_reads_fp32_logits() -> None:
    model, x = nn.Linear(8, 6), torch.randn(16, 8)
    logits = mixprec(model)(x)
    loss = F.cross_entropy(logits, torch.arange(16) % 6)
    loss.backward()
    assert (logits.dtype, loss.dtype, model.weight.grad.dtype) == (torch.float32,) * 3
    exact = F.cross_entropy(in_fp64(model)(x.double()), torch.arange(16) % 6)
    assert error([loss.detach()], [exact.detach()]) < BOUND


def test_argmax_of_close_logits_is_that_of_the_logits_returned() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.next = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.layer(x).mul(1.001)
            return self.next(y), y, y.argmax(1), y.topk(3).indices, y.sort(1).indices, y > y.mean()

    model, x = Picks(), torch.randn(32, 8)
    compiled = mixprec(model)
    _, y, best, three, order, above = compiled(x)
    assert torch.equal(best, y.argmax(1))
    assert torch.equal(y.gather(1, three), y.topk(3).values)
    assert torch.equal(y.gather(1, order), y.sort(1).values)
    assert torch.equal(above, y > y.mean())
    assert low_matmuls(compiled)[0] == 2
