"""BERT: attention written out (matmul, softmax, dropout, matmul), dropout, LayerNorm after the residual."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class EagerAttentionBlock(nn.Module):
    """Features [B, T, D] -> the same shape."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        attended = self.output((self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))
        x = self.attention_norm(x + self.dropout(attended))
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """Features [B, T, D] -> mean square of the encoding, a scalar."""

    def __init__(self, width: int, layers: int, dropout: float = 0.0, head_size: int = 32) -> None:
        super().__init__()
        heads = width // head_size
        self.blocks = nn.Sequential(*(EagerAttentionBlock(width, heads, dropout) for _ in range(layers)))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).pow(2).mean()
