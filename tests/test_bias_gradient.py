"""keep_bias_gradient: a convolution's bias gradient is a sum in fp32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from mpcompile.passes import Policy, insert_casts, run_passes
from mpcompile.passes.bias_gradient import keep_bias_gradient
from mpcompile.passes.graph import is_backward
from tests.helpers import call, calls, dtypes, joint, layouts, ops, relative_error, run_flat, text, trace

X, W, BIAS = torch.randn(2, 3, 6), torch.randn(4, 3, 2), torch.randn(4)
G = torch.randn(2, 4, 5)
BACKWARD = "convolution_backward"


def convolution(bias: bool = True, **options: Any) -> fx.GraphModule:
    """The joint graph of a small convolution."""
    inputs = [X.clone().requires_grad_(), W.clone().requires_grad_()]
    if bias:
        inputs.append(BIAS.clone().requires_grad_())
    return joint(lambda *args: F.conv1d(*args, **options), *inputs)


def mask(gm: fx.GraphModule) -> Any:
    """Which gradients the backward of a convolution computes."""
    return call(gm, BACKWARD).args[10]


def test_bias_gradient_becomes_a_sum_of_the_unrounded_gradient() -> None:
    gm = convolution()
    keep_bias_gradient(call(gm, BACKWARD))
    assert text(gm).splitlines()[-5:] == [
        "convolution_backward: f32[2, 3, 6], f32[4, 3, 2] = aten.convolution_backward.default(tangents_1, "
        "primals_1, primals_2, [4], [1], [0], [1], False, [0], 1, [True, True, False])",
        "getitem: f32[2, 3, 6] = getitem(convolution_backward, 0)",
        "getitem_1: f32[4, 3, 2] = getitem(convolution_backward, 1)",
        "sum_dim_int_list: f32[4] = aten.sum.dim_IntList(tangents_1, [0, 2])",
        "return [convolution, getitem, getitem_1, sum_dim_int_list]",
    ]


def test_sum_keeps_the_place_of_the_gradient_in_the_outputs() -> None:
    gm = convolution()
    before = layouts(gm)
    keep_bias_gradient(call(gm, BACKWARD))
    gm.graph.lint()
    assert layouts(gm) == before
    assert mask(gm) == [True, True, False]
    total = call(gm, "sum")
    assert total.args == (gm.graph.find_nodes(op="placeholder")[-1], [0, 2])
    assert is_backward(total)


def test_other_operations_are_left_alone() -> None:
    gm = trace(torch.mm, torch.randn(2, 2), torch.randn(2, 2))
    before = text(gm)
    keep_bias_gradient(call(gm, "mm"))
    assert text(gm) == before


def test_convolution_without_bias_is_left_alone() -> None:
    gm = convolution(bias=False)
    before = text(gm)
    keep_bias_gradient(call(gm, BACKWARD))
    assert text(gm) == before
    assert mask(gm) == [True, True, False]


def test_backward_of_nothing_but_the_bias_is_left_alone() -> None:
    gm = joint(F.conv1d, X, W, BIAS.clone().requires_grad_())
    before = text(gm)
    for node in calls(gm, BACKWARD):
        assert node.args[10] == [False, False, True]
        keep_bias_gradient(node)
    assert text(gm) == before


def test_bias_gradient_alone_stays_fp32() -> None:
    gm = joint(F.conv1d, X, W, BIAS.clone().requires_grad_())
    run_passes(gm, Policy())
    assert dtypes(gm)["convolution"] == [torch.bfloat16]
    found = run_flat(gm, X, W, BIAS, G)[-1]
    assert relative_error(found, G.double().sum((0, 2))) < G.numel() * 2.0**-24


def test_again_changes_nothing() -> None:
    gm = convolution()
    keep_bias_gradient(call(gm, BACKWARD))
    once = text(gm)
    keep_bias_gradient(call(gm, BACKWARD))
    assert text(gm) == once


CONVOLUTIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "1d": (F.conv1d, (2, 3, 6), (4, 3, 2)),
    "2d": (F.conv2d, (2, 3, 5, 4), (4, 3, 2, 2)),
    "3d": (F.conv3d, (1, 2, 3, 3, 3), (4, 2, 2, 2, 2)),
    "transposed": (F.conv_transpose1d, (2, 3, 6), (3, 4, 2)),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_bias_gradient_has_no_low_rounding(kind: str, low: torch.dtype) -> None:
    fn, shape, kernel = CONVOLUTIONS[kind]
    x, w = torch.randn(shape), torch.randn(kernel)
    gm = joint(fn, *(v.clone().requires_grad_() for v in (x, w, BIAS)))
    run_passes(gm, Policy(dtype=low))
    g = torch.randn_like(fn(x, w, BIAS))
    _, grad_x, grad_w, grad_bias = run_flat(gm, x, w, BIAS, g)
    truth = g.double().transpose(0, 1).flatten(1).sum(1)
    assert relative_error(grad_bias, truth) < g.numel() * 2.0**-24
    assert {v.dtype for v in (grad_x, grad_w, grad_bias)} == {torch.float32}
    assert dtypes(gm)["convolution_backward"][:2] == [low, low]


def test_gradients_are_those_of_fp64() -> None:
    gm = convolution()
    run_passes(gm, Policy())
    inputs = [v.double().requires_grad_() for v in (X, W, BIAS)]
    F.conv1d(*inputs).backward(G.double())
    found = run_flat(gm, X, W, BIAS, G)[1:]
    # Two rounded operands and a rounded result, each at most half a unit in the last of 8 bits.
    for gradient, leaf, bound in zip(found, inputs, (3 * 2.0**-8, 3 * 2.0**-8, 2.0**-20), strict=True):
        assert leaf.grad is not None
        assert relative_error(gradient, leaf.grad) < bound


def test_bias_gradient_of_a_computed_gradient_reads_it_unrounded() -> None:
    inputs = [v.clone().requires_grad_() for v in (X, W, BIAS)]
    gm = joint(lambda x, w, b: F.conv1d(x, w, b).tanh(), *inputs)
    run_passes(gm, Policy())
    gradient = call(gm, "sum").args[0]
    assert isinstance(gradient, fx.Node)
    assert "convert_element_type" not in str(gradient.target)
    assert gradient.meta["val"].dtype is torch.float32


def test_convolution_pinned_by_a_rule_computes_its_own_bias_gradient() -> None:
    gm = convolution()
    result = insert_casts(gm, Policy(fp32=("op:convolution",)))
    assert not result.changed
    assert mask(gm) == [True, True, True]
    assert "aten.sum.dim_IntList" not in ops(gm)
