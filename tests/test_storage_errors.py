"""The error of gradients against fp64 on models of the benchmarks, under two presets."""

import copy

import pytest
import torch
from torch import Tensor, nn

from benchmarks.workloads import workloads
from mpcompile.passes import Policy
from tests.helpers import UNIT_ROUNDOFF, double

MODELS = {workload.name: workload for workload in workloads("cpu")}


def gradient(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """All gradients of the loss, in a row."""
    model(*inputs).backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


# In units of the rounding of bfloat16: 0.93, 0.79 and 4.6 at most for two seeds, and as much again.
@pytest.mark.parametrize(("name", "bound"), [("GPT", 1.9), ("BERT", 1.6), ("ResNet", 9.0)])
def test_accurate_has_the_smaller_error_and_default_a_small_one(name: str, bound: float) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name].model(), MODELS[name].inputs()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    truth = gradient(copy.deepcopy(model).double(), double(inputs))
    error = {}
    for preset in ("accurate", "default"):
        torch._dynamo.reset()
        options = {"policy": Policy(preset=preset), "compiler": "aot_eager"}
        compiled = torch.compile(copy.deepcopy(model), backend="mixprec", options=options)
        error[preset] = float((gradient(compiled, inputs) - truth).norm() / truth.norm())
    assert error["accurate"] < error["default"] < bound * UNIT_ROUNDOFF[torch.bfloat16]
