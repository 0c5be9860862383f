"""UNet of a diffusion model: GroupNorm, SiLU, convolution; skip connections by concatenation.

The way up is a transposed convolution. With ``F.interpolate`` in its place compile+autocast on a CPU gives zero
gradients below it (torch 2.13; eager autocast does not), and a ratio of errors would mean nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UNetBlock(nn.Module):
    """Features [B, C_in, H, W] -> [B, C_out, H, W], with a 1x1 convolution on the residual."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.GroupNorm(8, channels), nn.GroupNorm(8, out)
        self.first = nn.Conv2d(channels, out, 3, padding=1)
        self.second = nn.Conv2d(out, out, 3, padding=1)
        self.residual = nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(F.silu(self.first_norm(x)))
        h = self.second(F.silu(self.second_norm(h)))
        return self.residual(x) + h


class UNet(nn.Module):
    """Noisy images [B, 3, H, W] and their noise [B, 3, H, W] -> mean squared error of the prediction, a scalar."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.left = UNetBlock(channels, channels)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.middle = UNetBlock(channels, 2 * channels)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.right = UNetBlock(2 * channels, channels)
        self.norm = nn.GroupNorm(8, channels)
        self.head = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        left = self.left(self.stem(images))
        middle = self.up(self.middle(self.down(left)))
        right = self.right(torch.cat((left, middle), dim=1))
        return F.mse_loss(self.head(F.silu(self.norm(right))), noise)
