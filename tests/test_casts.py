"""insert_casts and fold_casts: where casts go, what they leave alone, and that the numbers are right."""

from collections.abc import Callable, Iterator
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from mpcompile.passes import Policy, fold_casts, insert_casts, register_op, run_passes
from mpcompile.passes.graph import MARK, is_backward
from tests.helpers import (
    call,
    calls,
    count_casts,
    dtypes,
    flat,
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
LOWS = [torch.bfloat16, torch.float16]
A, B = torch.randn(4, 4), torch.randn(4, 4)
CASTS = (insert_casts, fold_casts)


def lowered(fn: Callable[..., Any], *inputs: torch.Tensor, policy: Policy = BF16) -> fx.GraphModule:
    """The forward graph of a function after the casts are in."""
    gm = trace(fn, *inputs)
    run_passes(gm, policy, CASTS)
    return gm


def left_alone(fn: Callable[..., Any], *inputs: torch.Tensor, policy: Policy = BF16) -> bool:
    """Whether the passes neither change a function's graph nor say so."""
    gm = trace(fn, *inputs)
    before = text(gm)
    return not reasons(run_passes(gm, policy, CASTS)) and text(gm) == before


def test_linear_in_bfloat16() -> None:
    gm = lowered(lambda x, w: F.linear(x, w).relu(), torch.randn(2, 3), torch.randn(4, 3))
    assert text(gm) == dedent("""\
        x_1: f32[2, 3] = input
        w_1: f32[4, 3] = input
        _to_copy_default_1: bf16[4, 3] = aten._to_copy.default(w_1, dtype=torch.bfloat16)
        _to_copy_default: bf16[2, 3] = aten._to_copy.default(x_1, dtype=torch.bfloat16)
        t_default: bf16[3, 4] = aten.t.default(_to_copy_default_1)
        mm: bf16[2, 4] = aten.mm.default(_to_copy_default, t_default)
        _to_copy_default_2: f32[2, 4] = aten._to_copy.default(mm, dtype=torch.float32)
        relu: f32[2, 4] = aten.relu.default(_to_copy_default_2)
        return relu""")


def test_matmul_of_a_matmul_reads_its_low_result_in_float16() -> None:
    gm = lowered(lambda x, w: x @ w @ w, A, torch.randn(4, 4), policy=FP16)
    assert text(gm) == dedent("""\
        x_1: f32[4, 4] = input
        w_1: f32[4, 4] = input
        _to_copy_default_1: f16[4, 4] = aten._to_copy.default(w_1, dtype=torch.float16)
        _to_copy_default: f16[4, 4] = aten._to_copy.default(x_1, dtype=torch.float16)
        mm: f16[4, 4] = aten.mm.default(_to_copy_default, _to_copy_default_1)
        mm_1: f16[4, 4] = aten.mm.default(mm, _to_copy_default_1)
        _to_copy_default_3: f32[4, 4] = aten._to_copy.default(mm_1, dtype=torch.float32)
        return _to_copy_default_3""")


def test_graph_on_its_way_to_a_code_generator_gets_prims() -> None:
    gm = joint(torch.mm, A.clone().requires_grad_(), B)
    run_passes(gm, BF16)
    assert {node.target for node in inserted_casts(gm)} == {torch.ops.prims.convert_element_type.default}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64, torch.float16, torch.bfloat16])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    assert left_alone(torch.mm, A.to(dtype), B.to(dtype))


def test_contraction_of_size_one_is_left_alone() -> None:
    assert left_alone(torch.mm, A[:, :1].clone(), B[:1].clone())


def test_matmul_of_constants_is_left_alone() -> None:
    assert left_alone(lambda x: x + torch.mm(torch.ones(4, 4), torch.ones(4, 4)), A)


def test_matmul_that_is_only_ranked_is_left_alone() -> None:
    assert left_alone(lambda x, codes: (x - 2 * x @ codes.t()).argmin(1), A, torch.randn(4, 4))


def test_matmul_pinned_by_a_rule_is_left_alone() -> None:
    assert left_alone(torch.mm, A, B, policy=Policy(fp32=("op:mm",)))


def test_matmul_pinned_by_the_user_is_left_alone() -> None:
    gm = trace(torch.mm, A, B)
    call(gm, "mm").meta["custom"] = {MARK: "fp32|user|inside autocast(enabled=False)"}
    assert not insert_casts(gm, BF16).changed
    assert dtypes(gm)["mm"] == [torch.float32]


def test_fp32_policy_leaves_the_graph_alone() -> None:
    assert left_alone(torch.mm, A, B, policy=Policy(dtype=torch.float32))


def test_graph_without_products_is_left_alone() -> None:
    assert left_alone(lambda x: F.layer_norm(F.gelu(x), (4,)).softmax(-1).sum().exp(), A)


@pytest.fixture
def transposing() -> Iterator[torch._ops.OpOverload]:
    """A low operator whose 16-bit kernel returns its result transposed."""
    with torch.library._scoped_library("mpcompile_test", "FRAGMENT") as library:
        library.define("product(Tensor x, Tensor y) -> Tensor")

        def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * y if x.dtype is torch.float32 else (x * y).t().contiguous().t()

        library.impl("product", product, "CompositeExplicitAutograd")
        register_op("mpcompile_test::product", "low")
        yield torch.ops.mpcompile_test.product.default


def test_operation_whose_low_kernel_has_other_strides_is_left_alone(transposing: Any) -> None:
    assert left_alone(lambda x, y: transposing(x, y) + 1, A, B)
    gm = trace(lambda x, y: (transposing(x, y), x @ y), A, torch.randn(4, 4))
    run_passes(gm, BF16)
    assert operand_dtypes(call(gm, "mpcompile_test::product")) == {torch.float32}
    assert operand_dtypes(call(gm, "mm")) == {torch.bfloat16}
    assert not reasons(run_passes(gm, BF16))


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("depth", [2, 7, 64])
def test_forward_is_within_the_bound_of_one_rounding_each(low: torch.dtype, depth: int) -> None:
    x, w = torch.randn(5, depth), torch.randn(depth, 6)
    gm = lowered(torch.mm, x, w, policy=Policy(dtype=low))
    error = (gm(x, w).double() - x.double() @ w.double()).abs()
    assert (error <= matmul_bound(x, w, low, out=low)).all()
    assert error.max() > 0


@pytest.mark.parametrize("low", LOWS)
def test_gradients_are_within_the_bound_of_one_rounding_each(low: torch.dtype) -> None:
    x, w, g = torch.randn(5, 8), torch.randn(6, 8), torch.randn(5, 6)
    gm = joint(F.linear, x.clone().requires_grad_(), w.clone().requires_grad_())
    run_passes(gm, Policy(dtype=low))
    y, grad_x, grad_w = run_flat(gm, x, w, g)
    for found, (left, right) in {y: (x, w.t()), grad_x: (g, w), grad_w: (g.t(), x)}.items():
        error = (found.double() - left.double() @ right.double()).abs()
        assert (error <= matmul_bound(left, right, low, out=low)).all()
        assert found.dtype is torch.float32
        assert error.max() > 0


def test_bias_gradient_is_exact_in_fp32() -> None:
    x, w, b, g = torch.randn(50, 8), torch.randn(6, 8), torch.randn(6), torch.randn(50, 6)
    gm = joint(F.linear, x, w.clone().requires_grad_(), b.clone().requires_grad_())
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    run_passes(gm, BF16)
    assert names == ["primals_1", "primals_2", "primals_3", "tangents_1"]
    grad_b = run_flat(gm, x, w, b, g)[-1]
    assert relative_error(grad_b, g.double().sum(0)) < 50 * 2.0**-24


def test_convolution_is_within_the_bound_of_a_matmul() -> None:
    x, w = torch.randn(1, 3, 9), torch.randn(4, 3, 3)
    gm = lowered(F.conv1d, x, w)
    unfolded = x.unfold(2, 3, 1).permute(0, 2, 1, 3).reshape(7, 9)
    found = gm(x, w)[0].t().double()
    kernel = w.reshape(4, 9).t()
    bound = matmul_bound(unfolded, kernel, torch.bfloat16, out=torch.bfloat16)
    assert ((found - unfolded.double() @ kernel.double()).abs() <= bound).all()


@pytest.mark.parametrize("policy", [BF16, FP16], ids=str)
def test_again_changes_nothing(policy: Policy) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.LayerNorm(4))
    gm = joint(model, A.clone().requires_grad_())
    assert reasons(run_passes(gm, policy, CASTS))
    once = text(gm)
    assert reasons(run_passes(gm, policy, CASTS)) == []
    assert text(gm) == once


def test_outputs_keep_dtype_shape_and_strides() -> None:
    def several(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = x @ w
        return y, y.t(), y.bfloat16(), y.argmax(1), y.double(), x.expand(2, 4, 4) @ w

    gm = trace(several, A, torch.randn(4, 4).t())
    before = layouts(gm)
    run_passes(gm, BF16)
    assert layouts(gm) == before
    assert [(v.dtype, tuple(v.shape), v.stride()) for v in flat(gm(A, torch.randn(4, 4).t()))] == before


def test_result_says_what_happened() -> None:
    gm = trace(torch.mm, A, B)
    result = insert_casts(gm, BF16)
    assert result.name == "insert_casts"
    assert result.changed
    assert [(c.node, c.op, c.before, c.after, c.reason) for c in result.changes] == [
        ("_to_copy_default", "aten._to_copy.default", "", "bfloat16", f"low form of {names(gm)[0]}"),
        ("_to_copy_default_1", "aten._to_copy.default", "", "bfloat16", f"low form of {names(gm)[1]}"),
        ("mm", "aten.mm.default", "float32", "bfloat16", "matmul, convolution or attention"),
    ]


def names(gm: fx.GraphModule) -> list[str]:
    """The names of a graph's inputs."""
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]


def test_a_value_is_cast_once_however_many_read_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    gm = joint(lambda x: model(x) + model(x.t()), A.clone().requires_grad_())
    run_passes(gm, BF16)
    assert len(inserted_casts(gm, torch.bfloat16)) > 5
    assert set(count_casts(gm).values()) == {1}


def test_weight_is_cast_above_its_transpose_for_forward_and_backward() -> None:
    gm = joint(nn.Linear(4, 5, bias=False), torch.randn(3, 4, requires_grad=True))
    run_passes(gm, BF16)
    weight = next(n for n in gm.graph.nodes if n.op == "placeholder" and n.meta["val"].shape == (5, 4))
    (low,) = weight.users
    assert low in inserted_casts(gm, torch.bfloat16)
    readers = [node for node in calls(gm, "mm") if descends(node, low)]
    assert [is_backward(node) for node in readers] == [False, True]


def descends(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node reads ``source``, itself or through views."""
    views = [n for n in node.all_input_nodes if "permute" in str(n.target)]
    return source in node.all_input_nodes or any(descends(view, source) for view in views)


def test_copies_of_activations_are_not_recomputed() -> None:
    gm = joint(torch.mm, torch.randn(200, 4, requires_grad=True), B.clone().requires_grad_())
    run_passes(gm, BF16)
    assert inserted_casts(gm, torch.bfloat16)
    assert not [n for n in gm.graph.nodes if "recompute" in n.meta]


def test_ops_keep_their_order() -> None:
    gm = lowered(lambda x, w: (x @ w).relu().sum(), A, torch.randn(4, 4))
    computing = [op for op in ops(gm) if "_to_copy" not in op]
    assert computing == ["aten.mm.default", "aten.relu.default", "aten.sum.default"]


FOLDS: dict[str, tuple[Callable[..., Any], int]] = {
    "back from a widening": (lambda x: x.float().bfloat16().neg(), 0),
    "back from a widening, through a view": (lambda x: x.float().t().bfloat16().neg(), 0),
    "back from a widening, through a split": (lambda x: (x.float().split(2)[0].bfloat16().neg(), x.split(2)[1]), 0),
    "a narrowing and a widening (a rounding)": (lambda x: x.neg().half().bfloat16(), 2),
    "to the other 16-bit type": (lambda x: x.float().half().neg(), 2),
    "an output would alias an input": (lambda x: x.float().bfloat16(), 2),
    "an output would alias an input, through views": (lambda x: x.float().t().bfloat16()[None], 2),
    "an output would alias an output": (lambda x: ((y := x.neg()), y.float().bfloat16()), 2),
    "lays a slice out anew": (lambda x: x[:, :2].float().bfloat16().view(8).neg(), 2),
}


@pytest.mark.parametrize("case", FOLDS)
def test_casts_of_the_user_that_stay(case: str) -> None:
    fn, casts = FOLDS[case]
    x = A.bfloat16()
    gm = trace(fn, x)
    before, truth = text(gm), flat(gm(x))
    results = run_passes(gm, BF16, CASTS)
    assert sum("_to_copy" in op for op in ops(gm)) == casts
    assert (reasons(results) == [] and text(gm) == before) is bool(casts)
    assert all(torch.equal(one, other) for one, other in zip(flat(gm(x)), truth, strict=True))
