"""ConvNeXt: depthwise 7x7 convolution, LayerNorm over channels, pointwise GELU feed-forward, layer scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNextBlock(nn.Module):
    """Features [B, C, H, W] -> the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.scale * self.down(F.gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """Images [B, 3, H, W] and labels [B] -> mean cross entropy over ten classes, a scalar."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, stride=4)
        self.first = nn.Sequential(*(ConvNextBlock(channels) for _ in range(blocks)))
        self.downsample = nn.Conv2d(channels, 2 * channels, 2, stride=2)
        self.second = nn.Sequential(*(ConvNextBlock(2 * channels) for _ in range(blocks)))
        self.norm = nn.LayerNorm(2 * channels)
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.second(self.downsample(self.first(self.stem(images))))
        return F.cross_entropy(self.head(self.norm(x.mean((2, 3)))), labels)
