"""Models with a graph break, and a backend that keeps what it sees of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from mpcompile import torch_compat
from mpcompile.torch_compat import Site, find_site


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * self.scale
        torch._dynamo.graph_break()
        return x * self.scale


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Inner(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


class Seen:
    """What the functions under test find when torch calls a backend."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.sites: list[Site] = []
        self.forks: list[fx.GraphModule] = []
        self.metas: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []  # before Dynamo clears some of it

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.sites.append(self._site())
        self.forks.append(torch_compat.fork(gm))
        self.metas.append(([dict(node.meta) for node in gm.graph.nodes], dict(gm.meta)))
        return gm.forward

    @staticmethod
    def _site() -> Site:
        return find_site()
