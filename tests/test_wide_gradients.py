"""widen_gradients: gradients of 16-bit parameters leave the graph in fp32, without a last rounding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from mpcompile.passes import PassResult, Policy, run_passes
from mpcompile.passes.graph import op_name
from mpcompile.passes.scaling import SCALING
from mpcompile.passes.wide_gradients import WIDE_GRADIENTS, widen_gradients
from tests.helpers import calls, joint, layouts, ops, reasons, run_flat, text

BF16, FP16 = Policy(), Policy(dtype=torch.float16)
CAST = "prims.convert_element_type.default"


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape).to(dtype))


def joint_graph(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> fx.GraphModule:
    torch._dynamo.reset()
    return joint(fn, *inputs, **options)


def widen(gm: fx.GraphModule) -> PassResult:
    """Run the pass under the verifier."""
    return run_passes(gm, BF16, (widen_gradients,))[0]


def values(gm: fx.GraphModule) -> list[Tensor]:
    """Inputs that depend on nothing but the graph."""
    generator = torch.Generator().manual_seed(0)
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return [torch.randn(tuple(fake.shape), generator=generator).to(fake.dtype) for fake in fakes]


def check_unrounded(gm: fx.GraphModule) -> None:
    """Widen, and compare with the gradients before: the same numbers without their last rounding."""
    given = values(gm)
    outputs = [value for value in gm.graph.output_node().args[0] if value is not None]
    wide = {outputs.index(gm.graph.output_node().args[0][position]) for position in gm.meta[WIDE_GRADIENTS]}
    before = run_flat(gm, *given)
    assert widen(gm).changed
    after = run_flat(gm, *given)
    for index, (found, rounded) in enumerate(zip(after, before, strict=True)):
        if index in wide:
            assert (rounded.dtype, found.dtype) == (torch.bfloat16, torch.float32)
            assert torch.equal(found.bfloat16(), rounded)
            assert not torch.equal(found, rounded.float())
        else:
            assert found.dtype is rounded.dtype
            assert torch.equal(found, rounded)
    assert len({value.data_ptr() for value in after}) == len(after)


CHAINS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "the cast is last": (lambda w, x: x @ w.float(), (parameter(2, 4), torch.randn(3, 2))),
    "views before the cast": (lambda w, x: (w.float() * x).sin(), (parameter(2), torch.randn(3, 2))),
    "a view after the cast": (lambda w, x: x @ w.t().float(), (parameter(4, 2), torch.randn(3, 2))),
    "views after the cast": (lambda w, x: x @ w.view(2, 4).t().float(), (parameter(8), torch.randn(3, 4))),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_the_last_rounding_of_a_gradient_is_left_out(chain: str) -> None:
    fn, inputs = CHAINS[chain]
    gm = joint_graph(fn, *inputs)
    (_, narrow), others = layouts(gm), ops(gm).count(CAST)
    check_unrounded(gm)
    assert layouts(gm)[1] == (torch.float32, *narrow[1:])
    assert ops(gm).count(CAST) == others - 1  # no cast is put in, the narrowing is gone


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_gradient_has_the_bits_it_has_for_a_float32_parameter(low: torch.dtype) -> None:
    w, x, tangent = parameter(3, 4, dtype=low), torch.randn(5, 3), torch.randn(5, 4)
    gm = joint_graph(lambda w, x: x @ w.float(), w, x)
    widen(gm)
    master = w.detach().float().requires_grad_()
    (x @ master).backward(tangent)
    _, gradient = run_flat(gm, w.detach(), x, tangent)
    assert torch.equal(gradient, master.grad)


def test_the_gradient_of_a_16_bit_product_is_widened() -> None:
    gm = joint_graph(lambda w, x: torch.mm(w, x), parameter(3, 4), torch.randn(4, 5).bfloat16())
    given = values(gm)
    _, rounded = run_flat(gm, *given)
    widen(gm)
    _, gradient = run_flat(gm, *given)
    assert gradient.dtype is torch.float32
    assert torch.equal(gradient, rounded.float())


def test_other_gradients_are_left_alone() -> None:
    activation = parameter(3, 4) * 1  # no leaf: what reads its gradient computes in 16 bits
    gm = joint_graph(
        lambda w, h, b, x: (x @ w.float() @ h.float() + b).sin(),
        *(parameter(2, 3), activation, nn.Parameter(torch.randn(4)), torch.randn(5, 2)),
    )
    dtypes = [dtype for dtype, *_ in layouts(gm)]
    (position,) = gm.meta[WIDE_GRADIENTS]
    check_unrounded(gm)
    assert sorted(map(str, dtypes)) == ["torch.bfloat16", "torch.bfloat16", "torch.float32", "torch.float32"]
    changed = [index for index, (dtype, *_) in enumerate(layouts(gm)) if dtype is not dtypes[index]]
    assert changed == [position]


SHARED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "with an fp32 input": (
        lambda w, x: (w.float() + x).tanh(),
        (parameter(2, 3), torch.randn(2, 3, requires_grad=True)),
    ),
    "with another such parameter": (lambda w, v: (w.float() + v.float()).tanh(), (parameter(2, 3), parameter(2, 3))),
    "with the incoming gradient": (lambda w, x: w.float() + x, (parameter(2, 3), torch.randn(2, 3))),
}


@pytest.mark.parametrize("case", SHARED)
def test_a_gradient_that_shares_its_value_has_memory_of_its_own(case: str) -> None:
    fn, inputs = SHARED[case]
    gm = joint_graph(fn, *inputs)
    check_unrounded(gm)


def test_the_changes_name_what_is_returned() -> None:
    gm = joint_graph(lambda w, x: x @ w.t().float(), parameter(4, 2), torch.randn(3, 2))
    (change,) = widen(gm).changes
    (returned,) = [value for value in gm.graph.output_node().args[0][1:] if value is not None]
    assert (change.node, change.op) == (returned.name, op_name(returned))
    assert (change.before, change.after) == ("bfloat16", "float32")


def test_again_changes_nothing() -> None:
    gm = joint_graph(lambda w, x: x @ w.t().float(), parameter(4, 2), torch.randn(3, 2))
    assert reasons(run_passes(gm, BF16))
    once = text(gm)
    assert reasons(run_passes(gm, BF16)) == []
    assert text(gm) == once


@pytest.mark.parametrize(
    "leaf", [parameter(2, 4) * 1, parameter(2, 4, dtype=torch.float32)], ids=["activation", "fp32"]
)
def test_a_graph_without_16_bit_parameters_is_left_alone(leaf: Tensor) -> None:
    gm = joint_graph(lambda w, x: x @ w.float(), leaf, torch.randn(3, 2))
    before = text(gm)
    assert widen(gm) == PassResult("widen_gradients", ())
    assert text(gm) == before


def test_a_gradient_computed_in_16_bits_is_rounded_once() -> None:
    gm = joint_graph(lambda w, x: x @ w.float(), parameter(2, 4), torch.randn(3, 2))
    run_passes(gm, BF16)
    (product,) = [node for node in calls(gm, "mm") if node.name == "mm_1"]
    assert product.meta["val"].dtype is torch.bfloat16
    (widening,) = product.users
    assert op_name(widening) == CAST
    assert [user.op for user in widening.users] == ["output"]
    assert layouts(gm)[1][0] is torch.float32


def test_a_scaled_gradient_is_unscaled_before_it_would_be_rounded() -> None:
    gm = joint_graph(lambda w, x: x @ w.float(), parameter(2, 2), torch.eye(2), scaled=True, low=torch.float16)
    run_passes(gm, FP16)
    # fp16 holds 1 + 2^-9 and bf16 does not; either would lose 2^-30 without the scale or its own exponent.
    tangent = torch.eye(2) * (1 + 2.0**-9) * 2.0**-30
    outputs = run_flat(gm, torch.zeros(2, 2).bfloat16(), torch.eye(2), torch.tensor(2.0**16), torch.zeros(1), tangent)
    assert gm.meta[SCALING].flags == len(gm.graph.output_node().args[0]) - 1
    _, gradient, flags = outputs
    assert gradient.dtype is torch.float32
    assert torch.equal(gradient, tangent)
    assert flags.tolist() == [0.0]


@pytest.mark.filterwarnings("ignore:1 trained parameters are bfloat16")
@pytest.mark.parametrize(("grad_dtype", "small"), [(torch.float32, 2.0**-12), (torch.bfloat16, 0.0)])
def test_gradients_accumulate_in_the_type_the_parameter_asks_for(grad_dtype: torch.dtype, small: float) -> None:
    w, x = parameter(2, 2), torch.eye(2)
    w.grad_dtype = grad_dtype
    options = {"dtype": "bf16", "compiler": "reference"}
    compiled = torch.compile(lambda w: x @ w.float(), backend="mixprec", options=options)
    for step in (1.0, 2.0**-12):  # bf16 has no number for the sum
        compiled(w).backward(torch.full((2, 2), step))
    assert w.grad is not None
    assert w.grad.dtype is grad_dtype
    assert torch.equal(w.grad.float(), torch.full((2, 2), 1 + small))
