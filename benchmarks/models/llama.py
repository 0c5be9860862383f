"""Llama: hand-written RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Hand-written as in Llama: widens with ``.to(float32)``, returns to the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, H, T, S] with cos and sin [T, S]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaBlock(nn.Module):
    """Features [B, T, D] -> the same shape."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.attention_norm, self.norm = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.size).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q = rotate(self._split(self.q(h), self.heads), cos, sin)
        k = rotate(self._split(self.k(h), self.kv_heads), cos, sin)
        v = self._split(self.v(h), self.kv_heads)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Features [B, T, D] -> mean square of the normalised output, a scalar."""

    def __init__(self, width: int, layers: int, head_size: int = 32) -> None:
        super().__init__()
        heads = width // head_size
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, heads // 2) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, width, bias=False)
        frequencies = 10000.0 ** -(torch.arange(0, head_size, 2) / head_size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        angles = positions[:, None].float() @ self.frequencies[None, :].float()
        cos, sin = (torch.cat((f(angles), f(angles)), dim=-1).to(x.dtype) for f in (torch.cos, torch.sin))
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x)).pow(2).mean()
