"""Compile a model to look at it, without consequences for the user's own compilations of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch


def compile_apart(subject: Callable[..., Any], backend: Any, options: Mapping[str, Any]) -> Callable[..., Any]:
    """``torch.compile`` for a look at a model: it does not count against the limit on recompilations of the user's own.

    Relies on: before torch 2.13, which has ``isolate_recompiles``, ``torch._dynamo.config.recompile_limit`` is read
    while the model runs.
    """
    start: Any = torch.compile
    if "isolate_recompiles" in inspect.signature(start).parameters:
        return start(subject, backend=backend, options=dict(options), isolate_recompiles=True)  # type: ignore[no-any-return]
    unlimited: Any = torch._dynamo.config.patch(recompile_limit=10**6, accumulated_recompile_limit=10**6)
    return unlimited(start(subject, backend=backend, options=dict(options)))  # type: ignore[no-any-return]
