"""Contributions add up to the error that is measured."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mpcompile
from examples.gpt import Shape
from examples.gpt import build as build_gpt
from tests.analysis_tools import ARCHITECTURES, Plain, build

few = settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@few
@given(seed=st.integers(0, 1000), dtype=st.sampled_from(["bf16", "fp16"]))
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.__name__)
def test_contributions_add_up(architecture: Callable[[nn.Module], nn.Module], seed: int, dtype: str) -> None:
    torch.manual_seed(seed)
    model, x = build(architecture, Plain)
    comparison = mpcompile.compare(model, x, options={"dtype": dtype})
    assert comparison.barriers == ()
    assert comparison.first_nonfinite() is None
    assert max(node.amplified for node in comparison.nodes) < 0.1
    # The requirement is a factor of 2; masks and maxima that switch are followed, so a first-order sum does better.
    assert comparison.attributed == pytest.approx(1, abs=0.2)
    assert sum(n.contribution + n.amplified for n in comparison.nodes) == pytest.approx(comparison.attributed, rel=0.02)


@pytest.fixture(scope="module")
def gpt() -> mpcompile.Comparison:
    model = build_gpt(Shape(layers=2, width=64, context=16), 0, torch.device("cpu"))
    tokens = torch.randint(0, 256, (2, 17))
    return mpcompile.compare(model, tokens[:, :-1], tokens[:, 1:], options={"dtype": "bf16"})


@pytest.mark.parametrize(
    "target", ["all", "loss", "output:0", "grad:layers.0.attention.qkv.weight", "grad:tokens.weight"]
)
def test_every_target_adds_up(gpt: mpcompile.Comparison, target: str) -> None:
    found = gpt.contributions(target)
    assert found.measured > 0
    assert 0.5 < found.total / found.measured < 2
    assert sum(node.value for node in found.nodes) == pytest.approx(found.total)
    sizes = [abs(node.value) for node in found.nodes]
    assert sizes == sorted(sizes, reverse=True)


def test_the_loss_is_the_only_output_here(gpt: mpcompile.Comparison) -> None:
    assert gpt.contributions("loss").measured == pytest.approx(gpt.contributions("output:0").measured)


def test_an_unknown_target(gpt: mpcompile.Comparison) -> None:
    with pytest.raises(KeyError, match="There is no target 'grad:nothing'; there are 'all', 'loss', 'output:0'"):
        gpt.contributions("grad:nothing")


def test_only_what_is_rounded_contributes() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    found = mpcompile.compare(model, torch.randn(8, 16), options={"dtype": "bf16", "fp32": ["0"]})
    share = {module: sum(abs(n.contribution) for n in found.nodes if n.module == module) for module in ("0", "1")}
    assert share["0"] < 1e-3
    assert share["1"] == pytest.approx(1, abs=1e-2)


def test_the_error_of_a_matmul_is_its_operands_and_its_result() -> None:
    layer = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-4, 5, (64, 64)).float())  # exact in bf16
    x = torch.randint(-4, 5, (32, 64)).float()
    exact = mpcompile.compare(layer, x, options={"dtype": "bf16"})
    (mm,) = [node for node in exact.nodes if node.direction == "forward" and "mm" in node.op]
    # Whole numbers up to 64 * 16: products and sums are exact, and only a result beyond 2^8 is rounded.
    truth = x.double() @ layer.weight.detach().double().T
    rounded = truth.bfloat16().double()
    assert mm.error == pytest.approx(float((rounded - truth).norm() / truth.norm()), rel=1e-6)
    assert mm.introduced == pytest.approx(mm.error, rel=1e-6)
    assert mm.inherited == 0


def test_a_flipped_mask_is_laid_to_those_who_moved_it() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu())

    found = mpcompile.compare(Masked(), torch.randn(256, 64), options={"dtype": "bf16", "fp32": ["last"]})
    switched = sum(node.switched for node in found.nodes)
    assert switched > 0.3
    share = sum(node.contribution for node in found.nodes if node.module == "first")
    assert share == pytest.approx(1, abs=0.1)
