"""A training text that is on every machine: the Python standard library's own source, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


def read_stdlib(limit: int) -> Tensor:
    """Return the first `limit` bytes of the standard library's modules, in order of file name."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(text) >= limit:
            break
        text += path.read_bytes()
    return torch.frombuffer(text[:limit], dtype=torch.uint8).long()


def split(text: Tensor, held_out: float = 0.1) -> tuple[Tensor, Tensor]:
    """Split off the end of the text for evaluation."""
    at = int(len(text) * (1 - held_out))
    return text[:at], text[at:]


def draw_batches(text: Tensor, *, rows: int, context: int, seed: int) -> Iterator[Batch]:
    """Yield endless (tokens, next tokens) batches; the same seed gives the same batches."""
    if len(text) <= context:
        raise ValueError(f"A text of {len(text)} bytes is too short for a context of {context}.")
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (rows, 1), generator=generator)
        window = text[starts + torch.arange(context + 1)]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
