"""Graphs run node by node: as they are, and widened so that nothing is rounded."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mpcompile.analysis.attention import attend, is_attention
from mpcompile.analysis.evaluate import evaluate, run
from mpcompile.passes.graph import aten
from tests.analysis_tools import only_in
from tests.helpers import call, double, joint, relative_error, run_flat, trace


def values(gm: fx.GraphModule, *inputs: Tensor, wide: torch.dtype | None) -> Tensor:
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    found = run(gm, dict(zip(names, inputs, strict=True)), wide, {})["output"][0]
    return found if isinstance(found, Tensor) else found[0]


def rounds(x: Tensor) -> Tensor:
    half = x.half() + torch.full((4,), 0.1, dtype=torch.float16)
    return half.to(torch.float32).sum(dtype=torch.bfloat16) * torch.ones(4)


def exact(x: Tensor) -> Tensor:
    return (x + torch.full((4,), 0.1, dtype=torch.float64)).sum() * torch.ones(4, dtype=torch.float64)


def test_a_wide_run_rounds_nothing_whatever_dtypes_the_graph_asks_for() -> None:
    x = torch.randn(4)
    gm = trace(rounds, x)
    found = values(gm, x, wide=torch.float64)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, exact(x.double()), rtol=1e-15, atol=0)
    assert torch.equal(values(gm, x, wide=None), rounds(x))


def test_random_numbers_are_drawn_once() -> None:
    x = torch.randn(64)
    gm = trace(lambda x: x * torch.bernoulli(torch.full((64,), 0.5)) + torch.rand(64), x)
    (name,) = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    draws: dict[str, object] = {}
    first, second = (run(gm, {name: x}, wide, draws)["output"][0] for wide in (None, torch.float64))
    assert draws
    torch.testing.assert_close(first.double(), second, rtol=1e-6, atol=1e-6)


def test_what_a_graph_writes_into_its_inputs_is_a_value_here() -> None:
    def update(x: Tensor, buffer: Tensor) -> Tensor:
        return aten.copy_.default(buffer, x * 2)

    x, buffer = torch.randn(4), torch.zeros(4)
    gm = trace(update, x, buffer)
    assert torch.equal(values(gm, x, buffer, wide=None), x * 2)
    assert torch.equal(buffer, torch.zeros(4))


def test_an_operator_of_ones_own_sees_the_dtypes_it_was_traced_with() -> None:
    x, operator = torch.randn(4), only_in(torch.float32)
    gm = trace(lambda x: operator(x * 1), x)
    found = values(gm, x, wide=torch.float64)
    assert found.dtype is torch.float64
    assert torch.equal(found, x.sin().double())


def kernel(is_causal: bool, mask: Tensor | None, *shape: int) -> tuple[fx.Node, list[Tensor], Tensor]:
    """An attention kernel with its backward as nodes of a graph, operands in fp64, and the gradient of its result."""
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    gm = joint(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal), q, k, v)
    (node,) = [n for n in gm.graph.nodes if is_attention(n) and "backward" not in n.name]
    return node, [double(t.detach()).requires_grad_() for t in (q, k, v)], torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("form", ["plain", "causal"])
def test_attention_by_its_formula_is_the_math_of_torch(form: str) -> None:
    node, operands, gradient = kernel(form == "causal", None, 2, 3, 8, 4)
    q, k, v = operands
    args = (q, k, v, 0.0, form == "causal")
    output, statistics = attend(node, args, {})
    scores = q @ k.transpose(-1, -2) / 2  # the root of 4
    if form == "causal":
        scores = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)
    truth = scores.softmax(-1) @ v
    torch.testing.assert_close(output, truth)
    torch.testing.assert_close(statistics, scores.logsumexp(-1))
    backward = next(n for n in node.graph.nodes if is_attention(n) and "backward" in n.name)
    found = attend(backward, (gradient, q, k, v, output, statistics, 0.0, form == "causal"), {})
    for mine, exact_gradient in zip(found, torch.autograd.grad(truth, operands, gradient), strict=True):
        torch.testing.assert_close(mine, exact_gradient)


def test_attention_with_a_mask_and_grouped_heads() -> None:
    node, _, _ = kernel(False, None, 1, 4, 6, 8)
    q, k, v = torch.randn(1, 4, 6, 8).double(), torch.randn(1, 2, 6, 8).double(), torch.randn(1, 2, 6, 8).double()
    mask = torch.rand(6, 6) > 0.3
    mask[:, 0] = True
    mask[2] = False  # attends to nothing
    output, _ = attend(node, (q, k, v), {"attn_mask": mask})
    truth = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(output[:, :, mask.any(1)], truth[:, :, mask.any(1)])
    assert torch.equal(output[:, :, 2], torch.zeros_like(output[:, :, 2]))


def test_the_formula_agrees_with_the_kernel() -> None:
    node, operands, _ = kernel(True, None, 2, 2, 16, 8)
    single = [operand.detach().float() for operand in operands]
    found = evaluate(node, (*(o.detach() for o in operands), 0.0, True), {}, torch.float64)
    given = evaluate(node, (*single, 0.0, True), {}, None)
    assert relative_error(given[0], found[0]) < 1e-6
    assert relative_error(given[1], found[1]) < 1e-6


def test_a_joint_graph_in_fp64_is_autograd_in_fp64() -> None:
    class Layer(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(super().forward(x).tanh(), (8,)).softmax(-1)

    layer, x, tangent = Layer(4, 8), torch.randn(16, 4), torch.randn(16, 8)
    gm = joint(layer, x)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    by_shape = {tuple(t.shape): t.detach() for t in (x, layer.weight, layer.bias)}
    shapes = [tuple(node.meta["val"].shape) for node in gm.graph.find_nodes(op="placeholder")]
    inputs = {n: tangent if n.startswith("tangents") else by_shape[s] for n, s in zip(names, shapes, strict=True)}
    outputs = run(gm, inputs, torch.float64, {})["output"][0]
    assert len(run_flat(gm, *inputs.values())) == 3
    layer.double()(x.double()).backward(tangent.double())
    for parameter in (layer.weight, layer.bias):
        (found,) = [o for o in outputs if o is not None and o.shape == parameter.shape]
        assert relative_error(found, parameter.grad) < 1e-14  # type: ignore[arg-type]
    assert call(gm, "rsqrt") is not None
