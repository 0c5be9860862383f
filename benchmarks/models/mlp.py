"""A wide MLP with a small batch: its time is the reading (and, in mixed precision, the casting) of its weights."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Features [B, width] -> [B, out]."""

    def __init__(self, width: int, layers: int, out: int) -> None:
        super().__init__()
        hidden = (layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU()))
        self.layers = nn.Sequential(*hidden, nn.Linear(width, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TrainedMLP(nn.Module):
    """Features [B, width] and targets [B, out] -> mean squared error, a scalar."""

    def __init__(self, width: int, layers: int, out: int) -> None:
        super().__init__()
        self.mlp = MLP(width, layers, out)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.mlp(x), target)
