"""Positions, frequencies and time steps keep every bit, whatever way they are computed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpcompile
from benchmarks.models import rotate
from tests.test_programs import BOUND, check, error, fp32_matmuls, in_fp64, low_matmuls, mixprec, step

FREQUENCIES = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
POSITIONS = torch.arange(65536, 65600)

ANGLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda p, f: p[:, None].to(f.dtype) @ f[None],
    "bmm": lambda p, f: (f[None, :, None].expand(2, -1, 1) @ p[None, None].expand(2, 1, -1).to(f.dtype)).mT[0],
    "einsum": lambda p, f: torch.einsum("t,f->tf", p.to(f.dtype), f),
    "outer": lambda p, f: torch.outer(p.to(f.dtype), f),
    "product": lambda p, f: p[:, None] * f,
    "linear": lambda p, f: F.linear(p[:, None].to(f.dtype), f[:, None]),
    # Two coordinates each: a contraction of more than one term.
    "grid": lambda p, f: torch.stack((p, p - 65536), 1).to(f.dtype) @ torch.stack((f, f / 3)),
}


class Rotary(nn.Module):
    """Attention with rotary positions; returns its tables as well."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.angles = ANGLES[how]
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("frequencies", FREQUENCIES.clone())

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angles = self.angles(positions, self.frequencies)
        cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
        q, k = rotate(self.q(x)[:, None], cos, sin), rotate(self.k(x)[:, None], cos, sin)
        return F.scaled_dot_product_attention(q, k, x[:, None]), cos, sin


@pytest.mark.parametrize("how", ANGLES)
def test_rotary_positions_stay_distinct(how: str) -> None:
    model, x = Rotary(how), torch.randn(2, 64, 8)
    eager_cos, eager_sin = model(x, POSITIONS)[1:]
    exact = in_fp64(model)
    compiled = mixprec(model)
    mixed, truth = step(compiled, model, [x, POSITIONS]), step(exact, exact, [x.double(), POSITIONS])
    assert torch.equal(mixed.outputs[1], eager_cos)
    assert torch.equal(mixed.outputs[2], eager_sin)
    assert len(torch.unique(torch.cat((mixed.outputs[1], mixed.outputs[2]), 1), dim=0)) == 64
    # fp32 angles near 65536 err by 2^-8: the attention is compared a little wider.
    assert error(mixed.outputs[:1], truth.outputs[:1]) < 2 * BOUND
    assert error(mixed.gradients, truth.gradients) < 2 * BOUND
    assert low_matmuls(compiled)[0] == 3
    assert torch.equal(model.frequencies, FREQUENCIES)
    assert model.frequencies.dtype == torch.float32


def test_positions_collapse_in_bf16() -> None:
    angles = POSITIONS[:, None].bfloat16() @ FREQUENCIES[None].bfloat16()
    assert len(torch.unique(angles, dim=0)) < 5  # what the tests above guard against


def test_positions_under_an_ambient_autocast() -> None:
    model, x = Rotary("matmul"), torch.randn(2, 64, 8)
    cos = model(x, POSITIONS)[1]
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(mpcompile.MixprecWarning, match="autocast is active"):
        found = mixprec(model)(x, POSITIONS)[1]
    # Dynamo traced the table as bf16, so it comes out rounded, but only once and after the cosine.
    assert torch.equal(found, cos.bfloat16())


class Denoiser(nn.Module):
    """Sinusoidal time steps and random Fourier features of coordinates, from buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, -9, 8)))
        self.register_buffer("features", torch.randn(2, 8) * 30)
        self.embed, self.out = nn.Linear(16, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        time = torch.outer(t.to(self.frequencies.dtype), self.frequencies)
        place = x @ self.features
        hidden = self.embed(torch.cat((time.sin(), place.sin()), 1))
        return self.out(F.silu(hidden)), time, place


def test_time_steps_and_fourier_features_from_buffers_are_fp32() -> None:
    model, x, t = Denoiser(), torch.rand(5, 2), torch.tensor([999, 998, 997, 2, 1])
    compiled = check(model, x, t, low=(2, 3))
    _, time, place = compiled(x, t)
    _, exact_time, exact_place = in_fp64(model)(x.double(), t)
    assert error([time, place], [exact_time, exact_place]) < 1e-6
    assert fp32_matmuls(compiled) == (1, 0)


def test_learned_frequencies_are_learned_and_low() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.out = nn.Parameter(torch.randn(2, 8)), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out((x @ self.features).sin())

    check(Learned(), torch.rand(5, 2), low=(2, 3))


def test_integer_positions_beyond_bf16_index_right() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(600, 4), nn.Linear(4, 4)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            return self.head(self.table(ids + 1)), (ids + 1).float()

    ids = torch.arange(255, 599)
    compiled = check(Lookup(), ids, low=(1, 2))
    assert torch.equal(compiled(ids)[1], torch.arange(256.0, 600))


def test_relative_position_bias_is_not_rounded_for_bucketing() -> None:
    class Buckets(nn.Module):
        """T5's logarithmic buckets of a distance, from a float."""

        def __init__(self) -> None:
            super().__init__()
            self.bias, self.q = nn.Embedding(16, 1), nn.Linear(8, 8)

        def forward(self, x: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
            bucket = (torch.log(distance.to(x.dtype) + 1) * 2.7).long().clamp(max=15)
            q = self.q(x)
            return (q @ q.mT + self.bias(bucket)[..., 0]).softmax(-1), bucket

    x, distance = torch.randn(6, 8), torch.randint(0, 300, (6, 6))
    model = Buckets()
    compiled = mixprec(model)
    assert torch.equal(compiled(x, distance)[1], model(x, distance)[1])
    assert error([compiled(x, distance)[0].detach()], [model(x, distance)[0].detach()]) < BOUND
