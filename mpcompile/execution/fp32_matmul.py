"""Set what an fp32 matmul means (IEEE or TF32) around a compiled model's forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpcompile.execution.backward_node import backward_nodes

_BACKENDS: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]


@contextlib.contextmanager
def fp32_matmul_precision(precision: str) -> Iterator[None]:
    """Within the context fp32 matmuls are ``"ieee"`` or ``"tf32"``; ``"inherit"`` leaves the process's setting."""
    if precision == "inherit":
        yield
        return
    before = _set(precision)
    try:
        yield
    finally:
        _restore(before)


def with_fp32_matmul(compiled: Callable[..., Any], precision: str) -> Callable[..., Any]:
    """Run ``compiled``, and the backward of what it returns, under ``precision``."""
    if precision == "inherit":
        return compiled

    def call(*args: Any) -> Any:
        with fp32_matmul_precision(precision):
            outputs = compiled(*args)
        _hook_backward(outputs, precision)
        return outputs

    return call


def _hook_backward(outputs: Any, precision: str) -> None:
    # One backward node computes the gradients of all outputs; its hooks bracket exactly that computation.
    for node in backward_nodes(outputs):
        saved: list[Any] = []
        node.register_prehook(lambda _grads, saved=saved: saved.append(_set(precision)))
        node.register_hook(lambda _ins, _outs, saved=saved: _restore(saved.pop()))


def _set(precision: str) -> list[str]:
    before = [backend.fp32_precision for backend in _BACKENDS]
    for backend in _BACKENDS:
        backend.fp32_precision = precision
    return before


def _restore(before: list[str]) -> None:
    for backend, precision in zip(_BACKENDS, before, strict=True):
        backend.fp32_precision = precision
