"""The physical limit of a step: the time of its matmuls, convolutions and attentions alone.

They are collected from one eager step, of the model in fp32 or in the low type, and run again on the very tensors they
had there, so shapes and strides are true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GEMMS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution", "convolution_backward")
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")


class Collector(TorchDispatchMode):
    """Collects the calls of matmuls, convolutions and attentions that happen inside it, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        """How often each distinct call happened: operator, and shapes, strides and dtypes of its operands."""
        self._calls: dict[Any, Callable[[], Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_gemm(func):
            leaves, _ = tree_flatten((args, kwargs))
            signature = (func, *(_describe(leaf) for leaf in leaves))
            self.counts[signature] += 1
            if signature not in self._calls:
                args_kept, kwargs_kept = tree_map(_detach, (args, kwargs))
                self._calls[signature] = lambda: func(*args_kept, **kwargs_kept)
        return func(*args, **kwargs)

    def replay(self) -> None:
        """Run every collected call again, as often as it happened."""
        with torch.no_grad():
            for signature, call in self._calls.items():
                for _ in range(self.counts[signature]):
                    call()


def collect(step: Callable[[], Any]) -> Collector:
    """The calls of one eager ``step``."""
    with Collector() as collector:
        step()
    return collector


def _is_gemm(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return func.namespace == "aten" and (name in GEMMS or name.startswith(ATTENTION))


def _describe(value: Any) -> Any:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else repr(value)


def _detach(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
