"""The table of workloads, and the sizes at which they are measured on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.models import DLRM, GPT, MLP, Bert, ConvNext, Llama, ResidualNet, TrainedMLP, UNet, ViT


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the models and their batches are."""

    batch: int
    """Sequences per step."""
    tokens: int
    """Per sequence."""
    width: int
    head_size: int
    layers: int
    vocabulary: int
    images: int
    """Images per step."""
    pixels: int
    """Edge of an image of the ViT and ConvNeXt."""
    patch: int
    """Edge of a patch of the ViT."""
    channels: int
    features: int
    """Edge of an image of the ResNet and UNet, which do not shrink it at the stem."""
    blocks: int
    """Of the convolutional nets."""
    clicks: int
    """Rows per step of the DLRM."""
    categories: int
    """Rows per embedding table of the DLRM."""
    mlp_width: int
    mlp_layers: int
    """Of the MLP's full width; one more maps to ``mlp_out``."""
    mlp_out: int


SIZES = {
    # A step under autocast takes a second at most where torch has only its slow bf16 kernels.
    "cpu": Sizes(
        batch=4,
        tokens=64,
        width=128,
        head_size=32,
        layers=2,
        vocabulary=256,
        images=4,
        pixels=32,
        patch=4,
        channels=32,
        features=16,
        blocks=2,
        clicks=64,
        categories=1000,
        mlp_width=2048,
        mlp_layers=1,
        mlp_out=256,
    ),
    "cuda": Sizes(
        batch=16,
        tokens=1024,
        width=1024,
        head_size=64,
        layers=8,
        vocabulary=32768,
        images=64,
        pixels=224,
        patch=16,
        channels=128,
        features=56,
        blocks=4,
        clicks=2048,
        categories=100_000,
        mlp_width=2048,
        mlp_layers=4,
        mlp_out=2048,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its inputs and what one step of it is."""

    name: str
    model: Callable[[], nn.Module]
    """Makes the model, in fp32; when ``training``, it returns the loss."""
    inputs: Callable[[], tuple[Tensor, ...]]
    training: bool = True
    """A step is forward and backward; otherwise forward in eval mode, without gradients."""
    micro_batches: int = 1
    """Forward and backward this often per step; gradients accumulate."""
    weight_cache: bool = False
    """mixprec keeps the low copies of the weights between calls."""


def workloads(device: str) -> list[Workload]:
    """All workloads at the sizes for ``device`` (``"cpu"`` or ``"cuda"``)."""
    return _transformers(SIZES[device]) + _images(SIZES[device]) + _wide(SIZES[device])


def _transformers(s: Sizes) -> list[Workload]:
    return [
        Workload(
            name="GPT",
            model=lambda: GPT(s.vocabulary, s.width, s.layers, s.tokens, s.head_size),
            inputs=lambda: (torch.randint(0, s.vocabulary, (s.batch, s.tokens)),),
        ),
        Workload(
            name="Llama",
            model=lambda: Llama(s.width, s.layers, s.head_size),
            inputs=lambda: (torch.randn(s.batch, s.tokens, s.width),),
        ),
        Workload(
            name="BERT",
            model=lambda: Bert(s.width, s.layers, dropout=0.1, head_size=s.head_size),
            inputs=lambda: (torch.randn(s.batch, s.tokens, s.width),),
        ),
        Workload(
            name="ViT",
            model=lambda: ViT(s.pixels, s.patch, s.width, s.layers, s.head_size),
            inputs=lambda: _labelled(s),
        ),
    ]


def _images(s: Sizes) -> list[Workload]:
    return [
        Workload(
            name="ConvNeXt",
            model=lambda: ConvNext(s.channels, s.blocks),
            inputs=lambda: _labelled(s),
        ),
        Workload(
            name="ResNet",
            model=lambda: ResidualNet(s.channels, s.blocks),
            inputs=lambda: (torch.randn(s.images, 3, s.features, s.features),),
        ),
        Workload(
            name="UNet",
            model=lambda: UNet(s.channels),
            inputs=lambda: (
                torch.randn(s.images, 3, s.features, s.features),
                torch.randn(s.images, 3, s.features, s.features),
            ),
        ),
    ]


def _wide(s: Sizes) -> list[Workload]:
    return [
        Workload(
            name="DLRM",
            model=lambda: DLRM(s.categories, tables=8, width=64, hidden=256),
            inputs=lambda: (
                torch.randn(s.clicks, 13),
                torch.randint(0, s.categories, (s.clicks, 8)),
                torch.rand(s.clicks).round(),
            ),
        ),
        Workload(
            name="MLP, 8 micro-batches",
            model=lambda: TrainedMLP(s.mlp_width, s.mlp_layers, s.mlp_out),
            inputs=lambda: (torch.randn(32, s.mlp_width), torch.randn(32, s.mlp_out)),
            micro_batches=8,
            weight_cache=True,
        ),
        *(_inference(s, batch) for batch in (1, 64)),
    ]


def _inference(s: Sizes, batch: int) -> Workload:
    return Workload(
        name=f"MLP inference, batch {batch}",
        model=lambda: MLP(s.mlp_width, s.mlp_layers, s.mlp_out),
        inputs=lambda: (torch.randn(batch, s.mlp_width),),
        training=False,
        weight_cache=True,
    )


def _labelled(s: Sizes) -> tuple[Tensor, Tensor]:
    return torch.randn(s.images, 3, s.pixels, s.pixels), torch.randint(0, 10, (s.images,))
