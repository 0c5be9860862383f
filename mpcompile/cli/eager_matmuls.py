"""Which matmuls of a model run outside its compiled graphs, and so in fp32."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpcompile.inspection.report import Report
from mpcompile.passes.op_classes import OpClass, classify

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent.parent)


@dataclass(frozen=True, slots=True)
class EagerMatmul:
    """A matmul, convolution or attention that the uncompiled model runs."""

    module: str
    """Path of the module whose ``forward`` runs it."""
    source: str
    """``file:line`` of the innermost line of the user's code; ``""`` in a model of torch's modules alone."""


def matmuls_outside(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], report: Report
) -> list[EagerMatmul]:
    """Run ``model`` uncompiled, and return what no graph of ``report`` holds: nothing there is from the
    same line (from the same module, where the line is torch's own).

    Runs forward on ``model`` itself; give it a copy.
    """
    captured = {_place(node.module, _users(node.source)) for node in report.nodes}
    counter = _Counter()
    with torch.random.fork_rng(), ExitStack() as stack:
        if isinstance(model, nn.Module):
            stack.enter_context(_current_module(model, counter))
        with counter:
            model(*args, **kwargs)
    return [found for found in counter.found if _place(found.module, found.source) not in captured]


def _place(module: str, source: str) -> str:
    """Where an operation is: its line; where that is not the user's, its module."""
    return source or module


def _users(source: str) -> str:
    return "" if source.startswith((_TORCH, _OWN)) else source


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules: list[str] = [""]
        self.found: dict[EagerMatmul, None] = {}  # in order, each once

    def leave(self) -> None:
        self.modules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if classify(func) is OpClass.LOW:
            self.found[EagerMatmul(self.modules[-1], next(filter(None, map(_users, _lines())), ""))] = None
        return func(*args, **(kwargs or {}))


def _lines() -> Iterator[str]:
    """``file:line`` of the frames that lead to an operator, innermost first, up to the call of the model."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not matmuls_outside.__code__:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back


@contextmanager
def _current_module(model: nn.Module, counter: _Counter) -> Iterator[None]:
    """Keep ``counter.modules``: the path of the module that is running on top."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            enter = module.register_forward_pre_hook(lambda *_, name=name: counter.modules.append(name))
            leave = module.register_forward_hook(lambda *_: counter.leave(), always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        yield
