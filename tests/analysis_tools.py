"""Three small architectures with room for a planted module, and faults to plant."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32


def only_in(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """An operator of one's own, a sine, named ``only_<dtype>``, that refuses any other dtype."""

    def sine(x: Tensor) -> Tensor:
        assert x.dtype is dtype
        return x.sin()

    operator = torch.library.custom_op(f"analysis_tests::only_{str(dtype)[6:]}", sine, mutates_args=())
    operator.register_fake(torch.empty_like)
    return operator


class Plain(nn.Module):
    """Two layers; no fault."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Overflows(Plain):
    """A weight 300 times too large, and its result squared: beyond fp16 in forward."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.up.weight.mul_(300)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu().square())


class GradientOverflows(nn.Module):
    """Values of ordinary size, and gradients a million times larger between two of its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * 1e-6) * 1e6


class EpsilonVanishes(nn.Module):
    """A norm in fp16 of small values: its epsilon rounds to zero, and so do the squares."""

    def forward(self, x: Tensor) -> Tensor:
        half = (x * 1e-4).half()
        return (half * torch.rsqrt(half.square().mean(-1, keepdim=True) + 1e-8)).float()


class Cancels(nn.Module):
    """The difference of two products that are nearly equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.load_state_dict(self.first.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return 100 * self.first(x) - 100 * self.second(x + 0.01 * x.tanh())


class Mlp(nn.Module):
    """Linear layers around the planted module."""

    inputs = (64, WIDTH)

    def __init__(self, planted: nn.Module) -> None:
        super().__init__()
        self.first, self.planted, self.middle = nn.Linear(WIDTH, WIDTH), planted, Plain()
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.planted(2 * self.first(x))).relu())


class Transformer(nn.Module):
    """One block of attention and MLPs on a residual stream."""

    inputs = (4, 16, WIDTH)

    def __init__(self, planted: nn.Module) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.norm, self.planted_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.planted, self.mlp = planted, Plain()

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*split.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        x = x + self.planted(self.planted_norm(x))
        return self.head(x + self.mlp(x))


class Convolutions(nn.Module):
    """A residual convolutional net with batch norm; the planted module works on its channels."""

    inputs = (4, 3, 8, 8)

    def __init__(self, planted: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.first_norm, self.second_norm = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)
        self.planted, self.head = planted, nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first_norm(self.first(x)).relu()
        x = x + self.planted(x.movedim(1, -1)).movedim(-1, 1)
        x = F.max_pool2d(self.second_norm(self.second(x)).relu(), 2)
        return self.head(x.mean((-1, -2)))


ARCHITECTURES: tuple[Callable[[nn.Module], nn.Module], ...] = (Mlp, Transformer, Convolutions)


def build(architecture: Callable[[nn.Module], nn.Module], planted: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    """A model with a planted module, and an input for it."""
    model = architecture(planted())
    return model, torch.randn(model.inputs)  # type: ignore[arg-type]
