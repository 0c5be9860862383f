"""Differentiation over the nodes of a joint graph, backward nodes included, against autograd."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mpcompile.analysis.adjoint import pull_back, total
from mpcompile.analysis.evaluate import run
from mpcompile.passes.graph import output_of
from tests.helpers import joint, trace


class Block(nn.Module):
    """Attention, a norm, a convolution and pooling: what has derivatives of its own in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.first(x)).relu(), 2).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
        return F.gelu(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def inputs_of(gm: fx.GraphModule) -> dict[str, Any]:
    nodes = gm.graph.find_nodes(op="placeholder")
    return {
        n.name: torch.randn(n.meta["val"].shape).double() if n.meta["val"].is_floating_point() else torch.tensor(0)
        for n in nodes
    }


def test_gradients_of_gradients_are_those_of_finite_differences() -> None:
    gm = joint(Block(), torch.randn(2, 3, 4, 4))
    inputs = inputs_of(gm)
    values = run(gm, inputs, torch.float64, {})
    results = [node for node in output_of(gm).args[0] if isinstance(node, fx.Node)]  # type: ignore[union-attr]
    results = [node for node in results if node.meta["val"].is_floating_point()]
    seeds = {node: torch.randn_like(values[node.name]) for node in results}
    barriers: dict[str, str] = {}
    found = {node.name: total(c)[0] for node, c in pull_back(gm, values, dict(seeds), {}, barriers)}
    assert barriers == {}

    def objective(given: dict[str, Any]) -> float:
        again = run(gm, given, torch.float64, {})
        return sum(float((again[node.name] * seed).sum()) for node, seed in seeds.items())

    for name, value in inputs.items():
        if not value.is_floating_point():
            continue
        direction, step = torch.randn_like(value), 1e-6
        ends = [objective({**inputs, name: value + sign * step * direction}) for sign in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * step)
        gradient = found.get(name)
        product = 0.0 if gradient is None else float((gradient * direction).sum())
        assert abs(slope - product) <= 1e-5 * (abs(slope) + 1), name


def test_readers_of_a_cast_are_kept_apart() -> None:
    def two_readers(x: Tensor, w: Tensor) -> Tensor:
        low = x.to(torch.bfloat16).t()
        return (low.t() @ w).sum() + 3 * low.float().sum()

    gm = trace(two_readers, torch.randn(4, 4), torch.randn(4, 4).bfloat16())
    inputs = inputs_of(gm)
    values = run(gm, inputs, torch.float64, {})
    result = output_of(gm).all_input_nodes[0]
    cast = next(node for node in gm.graph.nodes if "to_copy" in node.name or "convert" in node.name)
    found = {node: c for node, c in pull_back(gm, values, {result: torch.ones((), dtype=torch.float64)}, {}, {})}[cast]
    by_op = {reader.rstrip("_0123456789"): cotangent[0] for reader, cotangent in found.items()}
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    assert set(by_op) == {"mm", "sum"}
    torch.testing.assert_close(by_op["sum"], torch.full((4, 4), 3.0, dtype=torch.float64))
    torch.testing.assert_close(by_op["mm"], inputs[names[1]].sum(1).expand(4, 4))


def test_damping_is_a_factor_on_what_goes_further() -> None:
    gm = trace(lambda x: x.sin().exp().sum(), torch.randn(4))
    inputs = inputs_of(gm)
    values = run(gm, inputs, torch.float64, {})
    result = output_of(gm).all_input_nodes[0]
    one = torch.ones((), dtype=torch.float64)
    plain, damped = (
        {node.name: total(c)[0] for node, c in pull_back(gm, values, {result: one}, factor, {})}
        for factor in ({}, {"exp": 0.25})
    )
    assert plain["exp"] is not None
    assert damped["exp"] is not None
    assert torch.equal(plain["exp"], damped["exp"])
    torch.testing.assert_close(damped["sin"], plain["sin"] / 4)  # type: ignore[operator]


@torch.library.custom_op("analysis_tests::no_derivative", mutates_args=())
def no_derivative(x: Tensor) -> Tensor:
    return x.sin()


@no_derivative.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_without_derivative_is_named() -> None:
    gm = trace(lambda x: no_derivative(x * 2).sum(), torch.randn(4))
    values = run(gm, inputs_of(gm), torch.float64, {})
    barriers: dict[str, str] = {}
    result = output_of(gm).all_input_nodes[0]
    seen = [node.name for node, _ in pull_back(gm, values, {result: torch.tensor(1.0).double()}, {}, barriers)]
    assert list(barriers) == ["no_derivative"]
    assert "mul" not in seen
