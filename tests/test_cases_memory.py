"""What is saved for backward, and that the casts survive code generation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import mpcompile
from tests.test_programs import BOUND, check, error, fp32_matmuls, in_fp32, low_matmuls, mixprec


def saved(compiled: Callable[..., Tensor], model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """The tensors kept between forward and backward, parameters apart."""
    found: dict[int, Tensor] = {}

    def keep(value: Tensor) -> Tensor:
        found[value.untyped_storage().data_ptr()] = value
        return value

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        loss = compiled(*inputs).square().mean()
    loss.backward()
    given = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return [value for pointer, value in found.items() if pointer not in given]


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(value.untyped_storage().nbytes() for value in tensors)


class Feedforward(nn.Module):
    """Norm, GELU, dropout, two layers."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.recompute = recompute

    def block(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "feed-forward": (Feedforward, (256, 32), 0.8),
    "checkpointed": (lambda: Feedforward(True), (256, 32), 1.0),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)),
        (256, 32),
        0.8,
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        (8, 4, 12, 12),
        0.8,
    ),
    "few rows": (lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), (160, 32), 0.8),
}


@pytest.mark.parametrize("name", MODELS)
def test_less_is_saved_for_backward_than_in_fp32(name: str) -> None:
    make, shape, share = MODELS[name]
    model, x = make(), torch.randn(shape)
    fp32 = bytes_of(saved(in_fp32(model), model, x))
    torch._dynamo.reset()
    low = bytes_of(saved(mixprec(model), model, x))
    assert low <= share * fp32


@pytest.mark.parametrize("rows", [128, 1024])
def test_no_low_copy_of_a_weight_is_saved(rows: int) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 24))
    kept = saved(mixprec(model), model, torch.randn(rows, 32))
    assert {value.dtype for value in kept} >= {torch.bfloat16}
    sizes = {parameter.numel() for parameter in model.parameters()}
    assert not [value.shape for value in kept if value.untyped_storage().nbytes() // value.itemsize in sizes]


def test_a_weight_is_narrowed_once_for_all_its_readers() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = torch.tanh(self.layer(x))
            return x

    compiled = check(Shared(), torch.randn(4, 8), low=(4, 7))
    (report,) = mpcompile.reports(compiled)
    assert sorted(cast.parameter for cast in report.casts if cast.parameter) == ["layer.bias", "layer.weight"]


@pytest.mark.inductor
def test_matmul_plus_fp32_matrix_through_inductor() -> None:
    class Sum(nn.Module):
        """Inductor fuses a matmul and an addition into one call."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.table = nn.Linear(16, 16, bias=False), nn.Parameter(torch.randn(8, 16))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.table

    check(Sum(), torch.randn(8, 16), low=(1, 1), compiler="inductor")


@pytest.mark.inductor
def test_strict_numerics_round_through_inductor() -> None:
    class Rounds(nn.Module):
        """A layer, then a rounding the user wrote."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), (x * 1.7).to(torch.bfloat16).float() - x

    x = torch.randn(8, 16)
    found = mixprec(Rounds(), compiler="inductor", numerics="strict")(x)[1]
    assert torch.equal(found, (x * 1.7).to(torch.bfloat16).float() - x)


class Flexible(nn.Module):
    """Flex attention with a bias of the distance and a causal block mask."""

    def __init__(self, out: nn.Module) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), out

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - 0.1 * (i - j)

        q, k, v = self.qkv(x).view(1, 128, 3, 1, 16).permute(2, 0, 3, 1, 4)
        return self.out(flex_attention(q, k, v, score_mod=bias, block_mask=mask))


@pytest.mark.inductor
@pytest.mark.parametrize("out", [nn.Identity, lambda: nn.Linear(16, 8)], ids=["returned", "projected"])
@torch.no_grad()
def test_flex_attention_through_inductor(out: Callable[[], nn.Module]) -> None:
    model, x = Flexible(out()), torch.randn(1, 128, 16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cpu")
    compiled = mixprec(model, compiler="inductor")
    found = compiled(x, mask)
    q, k, v = model.double().qkv(x.double()).view(1, 128, 3, 1, 16).permute(2, 0, 3, 1, 4)
    distance = torch.arange(128)[:, None] - torch.arange(128)[None]
    scores = (q @ k.mT / 4 - 0.1 * distance).masked_fill(distance < 0, -torch.inf)
    assert error([found], [model.out(scores.softmax(-1) @ v)]) < BOUND
    assert found.dtype == torch.float32
    lowered = [change for r in mpcompile.reports(compiled) for g in r.graphs for p in g.results for change in p.changes]
    assert "flex_attention" in {change.op for change in lowered}
    assert low_matmuls(compiled)[0] == 1 + isinstance(model.out, nn.Linear)
    assert fp32_matmuls(compiled) == (0, 0)
