"""A wide MLP with a small batch: its time is the reading (and, in mixed precision, the casting) of its weights."""

from __future__ import annotations

from torch import Tensor, nn


class MLP(nn.Module):
    """Features [B, width] -> [B, out]."""

    def __init__(self, width: int, layers: int, out: int) -> None:
        super().__init__()
        hidden = (layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU()))
        self.layers = nn.Sequential(*hidden, nn.Linear(width, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TrainedMLP(MLP):
    """Features [B, width] and targets [B, out] -> mean squared error, a scalar."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(super().forward(x), target)
