"""Compare a model that reads its weights from the cache with one that rounds them in every call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpcompile.execution import low_copies
from tests.test_programs import mixprec


def cached(model: Callable[..., Any], **options: Any) -> Any:
    """``model`` compiled with the weight cache."""
    return mixprec(model, weight_cache=True, **options)


def rounded(model: Callable[..., Any], *inputs: Any, **options: Any) -> Tensor:
    """What ``model`` computes without the cache, compiled for this alone."""
    torch._dynamo.reset()
    found = mixprec(model, **options)(*inputs)
    assert isinstance(found, Tensor)
    return found.detach()


def copies() -> list[low_copies.LowCopy]:
    """The copies there are."""
    return list(low_copies._copies.values())


def count_of(model: nn.Module) -> int:
    """How many copies there are of a model's parameters."""
    return sum(copy.is_of(parameter) for copy in copies() for parameter in model.parameters())


class Refreshes:
    """Counts the multi-tensor copies, and the tensors in each."""

    def __init__(self, monkeypatch: Any) -> None:
        self.sizes: list[int] = []
        copy = torch._foreach_copy_

        def counting(targets: Any, sources: Any, *args: Any) -> Any:
            self.sizes.append(len(targets))
            return copy(targets, sources, *args)

        monkeypatch.setattr(torch, "_foreach_copy_", counting)
