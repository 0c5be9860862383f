"""The command line in this process: a folder with a model, and what a call printed."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpcompile.cli.main import main

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x, scale=1.0):
        return self.head(self.norm(self.body(x)).relu()) * scale


def make():
    return Net(), (torch.randn(32, 8),)
"""
"""What the examples of ``--help`` call ``model.py``."""


@dataclass(frozen=True)
class Call:
    """What one call of the command line came to."""

    code: int
    out: str
    err: str


def call(*arguments: str) -> Call:
    """Run ``python -m mpcompile`` with ``arguments``, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as ended:  # argparse: --help, or bad usage
            code = ended.code if isinstance(ended.code, int) else 1
    return Call(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def folder_with(files: dict[str, str], path: Path) -> Iterator[Path]:
    """Work in a folder with these files; forget what was imported from there afterwards."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("COLUMNS", "100")
        patch.setattr(sys, "path", [str(path), *sys.path])
        before = set(sys.modules)
        yield path
        for name in _from(path, set(sys.modules) - before):
            del sys.modules[name]


def _from(path: Path, names: Sequence[str] | set[str]) -> list[str]:
    return [name for name in names if str(getattr(sys.modules[name], "__file__", "")).startswith(str(path))]
