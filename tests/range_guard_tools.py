"""Graphs and layers with values beyond fp16's range, and what the tests of its guard read off them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from mpcompile.inspection.report import NodeRecord
from mpcompile.passes import Policy, run_passes
from tests.test_programs import matmuls, mixprec

INF, NAN = float("inf"), float("nan")
FP16 = Policy(dtype=torch.float16)
A, B = torch.randn(4, 4), torch.randn(4, 4)


def rewritten(gm: fx.GraphModule, policy: Policy = FP16) -> fx.GraphModule:
    """The graph after the passes."""
    run_passes(gm, policy)
    return gm


def in_fp16(model: Callable[..., Any], **options: Any) -> Any:
    """Compiled, with the gradients as they are unless ``options`` say otherwise."""
    return mixprec(model, **{"dtype": "fp16", "loss_scale": None, **options})


class Layers(nn.Module):
    """Three layers, the second of which has an element set."""

    def __init__(self, element: float, parameter: str = "weight") -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        with torch.no_grad():
            getattr(self.b, parameter).view(-1)[1] = element

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)) * 1e-6)


def decided(element: float, parameter: str = "weight", **options: Any) -> list[NodeRecord]:
    """The matmuls of three layers with one element set, forward and backward."""
    compiled = in_fp16(Layers(element, parameter), **options)
    compiled(torch.randn(3, 4, requires_grad=True)).sum().backward()
    return matmuls(compiled)


def rules_of(compiled: Any) -> list[str]:
    """Who decided, for every matmul of forward."""
    return [node.rule for node in matmuls(compiled) if node.direction == "forward"]
