"""run_passes: the order of the passes, every kind of graph it takes, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from mpcompile.passes import PASSES, PassResult, Policy, run_passes
from mpcompile.passes.graph import CAST, subgraphs
from tests.helpers import (
    call,
    calls,
    dtypes,
    exported,
    inserted_casts,
    joint,
    layouts,
    matmul_bound,
    operand_dtypes,
    ops,
    reasons,
    relative_error,
    run_flat,
    text,
    trace,
)

BF16, FP16 = Policy(), Policy(dtype=torch.float16)
A, W = torch.randn(4, 4), torch.randn(4, 4)


def mlp() -> nn.Module:
    """A small model with every class of operator."""
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3), nn.Softmax(-1))


def test_order_of_the_passes() -> None:
    names = """widen_gradients insert_loss_scaling keep_statistics_finite insert_casts fold_casts store_low
    save_masks_as_bytes"""
    assert [apply.__name__ for apply in PASSES] == names.split()


def test_one_result_per_pass_in_their_order() -> None:
    results = run_passes(trace(torch.mm, A, W), BF16)
    assert [result.name for result in results] == [apply.__name__ for apply in PASSES]
    assert [result.name for result in results if result.changed] == ["insert_casts"]


def test_fp32_policy_runs_nothing() -> None:
    gm = trace(torch.mm, A, W)
    before = text(gm)
    assert run_passes(gm, Policy(dtype=torch.float32)) == ()
    assert text(gm) == before


def test_graph_without_values_is_refused() -> None:
    gm = fx.symbolic_trace(lambda x: x @ x)
    with pytest.raises(ValueError, match=r"have no meta\['val'\]; run_passes needs a graph with fake values"):
        run_passes(gm, BF16)


def test_unread_casts_and_views_are_erased() -> None:
    gm = trace(lambda x, w: x @ w.t(), A, W)
    run_passes(gm, BF16)
    assert [node for node in calls(gm) if not node.users] == []
    assert ops(gm).count("aten.t.default") == 1


def test_the_rewritten_code_is_what_runs() -> None:
    gm = trace(torch.mm, A, W)
    before = gm(A, W)
    run_passes(gm, BF16)
    assert not torch.equal(gm(A, W), before)
    assert torch.equal(gm(A, W), (A.bfloat16() @ W.bfloat16()).float())


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bf16", "fp16"])
def test_joint_graph(policy: Policy) -> None:
    gm = joint(mlp(), A.clone().requires_grad_())
    before = layouts(gm)
    run_passes(gm, policy)
    products = [node for node in calls(gm) if node.target in PRODUCTS]
    assert [node.meta["val"].dtype for node in products] == [policy.dtype] * 6
    assert all(operand_dtypes(node) == {policy.dtype} for node in products)
    assert {v for name in ("exp", "sum_1", "var_mean") for v in dtypes(gm)[name]} == {torch.float32}
    assert layouts(gm) == before


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_graph_of_make_fx(mode: str) -> None:
    gm = make_fx(torch.mm, tracing_mode=mode)(A, torch.randn(4, 5))
    run_passes(gm, BF16)
    assert operand_dtypes(call(gm, "mm")) == {torch.bfloat16}
    x, w = torch.randn(7, 3), torch.randn(3, 2)
    if mode == "symbolic":
        assert ((gm(x, w) - x @ w).abs() <= matmul_bound(x, w, torch.bfloat16, torch.bfloat16)).all()


def test_joint_graph_with_dynamic_sizes() -> None:
    gm = joint(mlp(), torch.randn(5, 4, requires_grad=True), dynamic=True)
    run_passes(gm, BF16)
    products = [node for node in calls(gm) if node.target in PRODUCTS]
    assert [node.meta["val"].dtype for node in products] == [torch.bfloat16] * 6
    assert reasons(run_passes(gm, BF16)) == []


def test_exported_graph_is_rewritten_without_prims() -> None:
    gm = exported(mlp(), A)
    run_passes(gm, BF16)
    assert [operand_dtypes(node) for node in calls(gm, "addmm")] == [{torch.bfloat16}] * 2
    assert {node.target for node in inserted_casts(gm)} == {torch.ops.aten._to_copy.default}


def test_parameter_rule_finds_the_parameters_of_an_exported_graph() -> None:
    gm = exported(mlp(), A)
    run_passes(gm, Policy(fp32=("param:3.weight",)))
    assert [dtypes(gm)[node.name] for node in calls(gm, "addmm")] == [[torch.bfloat16], [torch.float32]]


def test_autograd_runs_through_an_exported_and_rewritten_graph() -> None:
    model = nn.Linear(4, 3)
    gm = exported(model, A)
    run_passes(gm, BF16)
    weight, bias = (p.detach().clone().requires_grad_() for p in model.parameters())
    (y,) = gm(weight, bias, A)
    g = torch.randn(4, 3)
    y.backward(g)
    error = (weight.grad.double() - g.t().double() @ A.double()).abs()
    # Autograd narrows the incoming gradient as well, so the two operands and the result are rounded.
    assert (error <= matmul_bound(g.t(), A, torch.bfloat16, torch.bfloat16)).all()
    assert error.max() > 0
    assert relative_error(bias.grad, g.sum(0)) < 2 * 2.0**-8


def conditional(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A matmul in each branch of a condition."""
    return torch.cond(x.sum() > 0, lambda a, b: (a @ b).sin(), lambda a, b: (a @ b.t()).cos(), (x, w))


@pytest.mark.parametrize("kind", ["make_fx", "joint"])
def test_branches_of_a_condition_are_rewritten(kind: str) -> None:
    inputs = [v.clone().requires_grad_() for v in (A, W)]
    gm = joint(conditional, *inputs) if kind == "joint" else trace(conditional, A, W)
    run_passes(gm, BF16)
    branches = [child for _, child in subgraphs(gm)]
    assert len(branches) == (4 if kind == "joint" else 2)
    for branch in branches:
        products = calls(branch, "mm")
        assert products
        assert all(operand_dtypes(node) == {torch.bfloat16} for node in products)
        ends = [*branch.graph.find_nodes(op="placeholder"), *branch.graph.output_node().all_input_nodes]
        assert {node.meta["val"].dtype for node in ends} == {torch.float32}
    assert reasons(run_passes(gm, BF16)) == []


@pytest.mark.parametrize("sign", [1, -1])
def test_a_rewritten_condition_computes_both_branches(sign: int) -> None:
    gm = trace(conditional, A, W)
    run_passes(gm, BF16)
    x = sign * A.abs()
    product = x.double() @ (W if sign > 0 else W.t()).double()
    truth = product.sin() if sign > 0 else product.cos()
    bound = matmul_bound(x, W if sign > 0 else W.t(), torch.bfloat16, torch.bfloat16)
    # sin and cos have a slope of at most one
    assert ((gm(x, W) - truth).abs() <= bound + 2.0**-20).all()


def test_module_rule_reaches_into_branches() -> None:
    gm = trace(conditional, A, W)
    run_passes(gm, Policy(fp32=("op:mm",)))
    assert [dtypes(child)["mm"] for _, child in subgraphs(gm)] == [[torch.float32]] * 2


def test_results_of_branches_are_reported() -> None:
    results = run_passes(trace(conditional, A, W), BF16)
    assert len(results) == 3 * len(PASSES)
    assert [change.op for result in results for change in result.changes].count("aten.mm.default") == 2


def test_inputs_of_two_16_bit_types_never_meet() -> None:
    gm = trace(lambda x, w: x.float() @ w, A.half(), W)
    run_passes(gm, BF16)
    assert operand_dtypes(call(gm, "mm")) == {torch.bfloat16}
    error = (gm(A.half(), W).double() - A.half().double() @ W.double()).abs()
    assert (error <= matmul_bound(A.half(), W, torch.bfloat16, torch.bfloat16)).all()


def test_float16_overflows_to_infinity_and_bfloat16_does_not() -> None:
    x = torch.full((2, 4), 1e5)
    results = {}
    for policy in (BF16, FP16):
        gm = trace(torch.mm, x, torch.ones(4, 2))
        run_passes(gm, policy)
        results[policy.dtype] = gm(x, torch.ones(4, 2))
    assert results[torch.float16].isinf().all()
    assert results[torch.bfloat16].isfinite().all()


def test_gradients_of_a_model_are_those_of_fp64() -> None:
    model = mlp()
    gm = joint(model, A.clone().requires_grad_())
    run_passes(gm, BF16)
    g = torch.randn(4, 3)
    exact = [leaf.detach().double().requires_grad_() for leaf in (*model.parameters(), A)]
    names = [name for name, _ in model.named_parameters()]
    double = model.double()
    y = torch.func.functional_call(double, dict(zip(names, exact[:-1], strict=True)), (exact[-1],))
    y.backward(g.double())
    found = run_flat(gm, *joint_order(gm, exact, names), g)
    assert relative_error(found[0], y) < 2.0**-6
    truths = {tuple(leaf.shape): leaf.grad for leaf in exact if leaf.dim() == 2}
    matrices = [v for v in found[1:] if v.dim() == 2]
    assert len(matrices) == 3
    for gradient in matrices:
        # Well conditioned, and at most eight roundings to 8 bits on any path.
        assert relative_error(gradient, truths[tuple(gradient.shape)]) < 8 * 2.0**-8


def joint_order(gm: fx.GraphModule, exact: list[torch.Tensor], names: list[str]) -> list[torch.Tensor]:
    """The leaves in the order of a joint graph's inputs, in fp32."""
    values = dict(zip([*names, None], exact, strict=True))
    inputs = [node.meta.get("mixprec_parameter") for node in gm.graph.find_nodes(op="placeholder")]
    return [values[name].detach().float() for name in inputs[:-1]]


def test_a_pass_of_ones_own_runs_under_the_same_runner() -> None:
    seen: list[Any] = []

    def count(gm: fx.GraphModule, policy: Policy) -> PassResult:
        seen.append((policy, sum(CAST in node.meta for node in gm.graph.nodes)))
        return PassResult("count", ())

    passes: tuple[Callable[..., PassResult], ...] = (*PASSES, count)
    results = run_passes(trace(torch.mm, A, W), FP16, passes)
    assert seen == [(FP16, 3)]
    assert results[-1].name == "count"
