"""The small models that are measured, and that the whole-program tests use: ordinary fp32 PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PreNormBlock(nn.Module):
    """GPT-2 block: LayerNorm, causal attention through SDPA, GELU feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """Token ids [B, T] -> mean next-token cross entropy, a scalar."""

    def __init__(self, vocabulary: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(PreNormBlock(width, width // 32) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class EagerAttentionBlock(nn.Module):
    """BERT block: attention written out (matmul, mask, softmax, dropout, matmul), norm after the residual."""

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
        attended = self.dropout(scores.softmax(-1)) @ v
        x = self.attention_norm(x + self.output(attended.transpose(1, 2).flatten(2)))
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """Features [B, T, D] -> mean square of the encoding, a scalar."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(EagerAttentionBlock(width, width // 32) for _ in range(layers)))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).pow(2).mean()


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


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, H, T, S] with cos and sin [T, S]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """Features [B, T, D] -> mean square of the normalised output, a scalar."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        heads = width // 32
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, heads // 2) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, width, bias=False)
        frequencies = 10000.0 ** -(torch.arange(0, 32, 2) / 32)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        angles = positions[:, None].float() @ self.frequencies[None, :].float()
        cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x)).pow(2).mean()


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and in-place ReLU, and the residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.first_norm(self.first(x)))
        return self.relu(self.second_norm(self.second(h)) + x)


class ResidualNet(nn.Module):
    """Images [B, 3, H, W] -> mean square of ten logits, a scalar."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(*(ResidualBlock(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3))).pow(2).mean()


@dataclass(frozen=True)
class Workload:
    """A model and its input; the model returns the loss."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]


def workloads(scale: int = 1) -> list[Workload]:
    """The four models; ``scale`` multiplies the batch."""
    return [
        Workload(
            "GPT",
            lambda: GPT(vocabulary=256, width=128, layers=2, context=64),
            lambda: (torch.randint(0, 256, (4 * scale, 64)),),
        ),
        Workload(
            "BERT, eager attention",
            lambda: Bert(width=128, layers=2),
            lambda: (torch.randn(4 * scale, 64, 128),),
        ),
        Workload(
            "Llama block",
            lambda: Llama(width=128, layers=2),
            lambda: (torch.randn(4 * scale, 64, 128),),
        ),
        Workload(
            "residual conv net",
            lambda: ResidualNet(channels=32, blocks=3),
            lambda: (torch.randn(4 * scale, 3, 16, 16),),
        ),
    ]
