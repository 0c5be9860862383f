"""Compile a model to look at it, without consequences for the user's own compilations of it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend


def compile_apart(subject: Callable[..., Any], backend: Any, options: Mapping[str, Any]) -> Callable[..., Any]:
    """``torch.compile`` for a look at a model; call what it returns under ``looking``."""
    if _isolates():
        start: Any = torch.compile
        return start(subject, backend=backend, options=dict(options), isolate_recompiles=True)  # type: ignore[no-any-return]
    return torch.compile(subject, backend=_another(backend), options=dict(options))


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Within the context, compiling does not end at the limit on recompilations that the user's own share.

    Relies on: before torch 2.13, which has ``isolate_recompiles``, ``torch._dynamo.config.recompile_limit`` is read
    while the model runs, and code compiled by one backend is not run for another.
    """
    if _isolates():
        yield
        return
    unlimited: Any = torch._dynamo.config.patch(recompile_limit=10**6, accumulated_recompile_limit=10**6)
    with unlimited:
        yield


def _isolates() -> bool:
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def _another(backend: Any) -> Callable[..., Any]:
    """A backend that equals no other: Dynamo runs what an equal one compiled before, for a model of equal structure."""
    found = lookup_backend(backend)

    def call(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        return found(gm, example_inputs, **kwargs)

    return call
