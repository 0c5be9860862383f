"""ViT: a patch convolution, pre-norm blocks with attention written out, a class token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VisionBlock(nn.Module):
    """Features [B, T, D] -> the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.projection(attended)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ViT(nn.Module):
    """Images [B, 3, P, P] and labels [B] -> mean cross entropy over ten classes, a scalar."""

    def __init__(self, pixels: int, patch: int, width: int, layers: int, head_size: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 1 + (pixels // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(VisionBlock(width, width // head_size) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(images.shape[0], -1, -1), patches), dim=1) + self.positions
        return F.cross_entropy(self.head(self.norm(self.blocks(x))[:, 0]), labels)
