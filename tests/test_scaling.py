"""insert_loss_scaling: S on what enters backward, 1/S and a flag on what leaves it, in graphs that are to be scaled."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from mpcompile import explain
from mpcompile.options import Options
from mpcompile.passes import PassError, PassResult, run_passes
from mpcompile.passes.graph import is_backward, op_name
from mpcompile.passes.scaling import SCALING, insert_loss_scaling
from tests.helpers import calls, joint, operand_dtypes, reasons, text
from tests.scaling_tools import FP16, custom, flags, gradients, joint_graph, leaf, named, same_bits, scale, scaled, site

# Dynamo's own, of every custom autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def test_a_matmul_line_by_line() -> None:
    gm = scaled(lambda x, w: x @ w, torch.randn(2, 3), leaf(3, 4))
    lines = text(gm).splitlines()
    forward, backward = lines[: lines.index("# backward")], lines[lines.index("# backward") :]
    assert forward == [
        "primals_1: f32[2, 3] = input",
        "primals_2: f32[3, 4] = input",
        "primals_3: f32[] = input",
        "primals_4: f32[1] = input",
        "tangents_1: f32[2, 4] = input",
        "mm: f32[2, 4] = aten.mm.default(primals_1, primals_2)",
    ]
    assert "inverse_scale: f32[] = aten.reciprocal.default(primals_3)" in backward
    steps = ("scaled_", "permute", "mm", "unscaled_", "return")
    assert [line for line in backward if line.startswith(steps)] == [
        "scaled_tangents_1: f32[2, 4] = aten.mul.Tensor(tangents_1, primals_3)",
        "permute: f32[3, 2] = aten.permute.default(primals_1, [1, 0])",
        "mm_1: f32[3, 4] = aten.mm.default(permute, scaled_tangents_1)",
        "unscaled_l_w_: f32[3, 4] = aten.mul.Tensor(mm_1, inverse_scale)",
        "return [mm, None, unscaled_l_w_, None, gradient_flags]",
    ]
    assert named(gm, "gradient_flags").meta["val"].shape == (1,)


def test_gradients_are_named_after_their_parameters() -> None:
    gm = scaled(nn.Linear(3, 4), torch.randn(2, 3))
    assert {node.name for node in calls(gm) if node.name.startswith("unscaled")} == {
        "unscaled_weight",
        "unscaled_bias",
    }


def test_the_changes_name_the_nodes_in_the_graph() -> None:
    gm = joint_graph(lambda x: F.relu(x) ** 2, leaf(3))
    before = {node.name for node in gm.graph.nodes}
    result = scale(gm)
    assert result.name == "insert_loss_scaling"
    assert [change.node for change in result.changes] == ["scaled_tangents_1", "unscaled_l_x_", "gradient_flags"]
    for change in result.changes:
        assert change.node not in before
        assert op_name(named(gm, change.node)) == change.op
        assert change.after == "float32"


def test_the_factor_surrounds_everything_that_is_narrow_in_float16() -> None:
    gm = joint_graph(lambda x, w, v: (x @ w).tanh() @ v, torch.randn(2, 3), leaf(3, 4), leaf(4, 2))
    run_passes(gm, FP16)
    start = named(gm, "scaled_tangents_1")
    ends = {named(gm, "unscaled_l_w_"), named(gm, "unscaled_l_v_")}
    assert all(operand_dtypes(node) == {torch.float32} for node in (start, *ends))
    narrow = [node for node in calls(gm) if is_backward(node) and node.meta["val"].dtype is torch.float16]
    derived = [node for node in narrow if reads(node, "tangents_1")]
    assert len(derived) >= 4  # two gradients narrowed, two products of them
    assert all(reads(node, "scaled_tangents_1") for node in derived)
    assert not any(reads(node, end.name) for node in narrow for end in ends)


def reads(node: fx.Node, name: str) -> bool:
    """Whether a node depends on another."""
    return any(source.name == name or reads(source, name) for source in node.all_input_nodes)


def test_gradients_below_the_range_of_float16_survive() -> None:
    gm = joint_graph(lambda x, w: x @ w, torch.eye(2), leaf(2, 2))
    run_passes(gm, FP16)
    tiny = {"primals_1": torch.eye(2), "tangents_1": torch.eye(2) * 2.0**-30}
    assert same_bits(gradients(gm, 2.0**16, **tiny), [torch.eye(2) * 2.0**-30])
    assert same_bits(gradients(gm, 1.0, **tiny), [torch.zeros(2, 2)])


@pytest.mark.parametrize(("factor", "flag"), [(2.0**15, 0.0), (2.0**16, 1.0)])
def test_a_scale_beyond_the_range_of_float16_is_flagged(factor: float, flag: float) -> None:
    gm = joint_graph(lambda x, w: x @ w, torch.eye(2), leaf(2, 2))
    run_passes(gm, FP16)
    assert flags(gm, factor, primals_1=torch.eye(2), tangents_1=torch.eye(2)) == [flag]


@pytest.mark.parametrize("passes", [(insert_loss_scaling,), None], ids=["the pass alone", "all passes"])
def test_again_changes_nothing(passes: Any) -> None:
    gm = joint_graph(custom(lambda g, x: g.clamp(-0.5, 0.5) @ x.t() @ x), leaf(3, 4))
    options = {} if passes is None else {"passes": passes}
    assert reasons(run_passes(gm, FP16, **options))
    once = text(gm)
    assert reasons(run_passes(gm, FP16, **options)) == []
    assert text(gm) == once


def test_a_graph_that_is_not_to_be_scaled_is_left_alone() -> None:
    gm = joint(lambda x, w: x @ w, torch.randn(2, 3), leaf(3, 4))
    before = text(gm)
    assert insert_loss_scaling(gm, FP16) == PassResult("insert_loss_scaling", ())
    assert text(gm) == before


SCALED: dict[str, tuple[dict[str, Any], bool]] = {
    "fp16": ({"dtype": "fp16"}, True),
    "fp16 with a fixed scale": ({"dtype": "fp16", "loss_scale": 1024.0}, True),
    "fp16 scaled by the training loop": ({"dtype": "fp16", "loss_scale": "external"}, False),
    "fp16 without a scale": ({"dtype": "fp16", "loss_scale": None}, False),
    "bf16": ({"dtype": "bf16"}, False),
    "fp32": ({"policy": "fp32"}, False),
}


@pytest.mark.parametrize("case", SCALED)
def test_the_backend_scales_only_what_computes_in_float16(case: str) -> None:
    options, expected = SCALED[case]
    ((_, after),) = explain(nn.Linear(3, 4), torch.randn(2, 3), options=options).modules
    inputs = len(after.graph.find_nodes(op="placeholder"))
    assert inputs == (6 if expected else 4)  # weight, bias, x, tangent; scale and probe
    assert ("inverse_scale" in text(after)) is expected


def test_inference_in_float16_is_not_scaled() -> None:
    with torch.no_grad():
        ((_, after),) = explain(nn.Linear(3, 4), torch.randn(2, 3), options={"dtype": "fp16"}).modules
    assert len(after.graph.find_nodes(op="placeholder")) == 3


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float32])
def test_other_types_than_float16_have_no_scale(low: torch.dtype) -> None:
    assert Options().scaling(low) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tangents": ()}, "0 tangents and 2 gradients"),
        ({"gradients": {}}, "1 tangents and 0 gradients"),
        ({"gradients": {1: 0}}, r"\(aten\.mm\.default.*\) would leave the graph where no gradient does"),
    ],
    ids=["no tangents", "no gradients", "one gradient too few"],
)
def test_scaled_values_that_would_not_be_unscaled_are_refused(wrong: dict[str, Any], message: str) -> None:
    gm = joint_graph(torch.mm, leaf(2, 3), leaf(3, 4))
    assert set(site(gm).gradients) == {1, 2}
    gm.meta[SCALING] = replace(site(gm), **wrong)
    with pytest.raises(PassError, match=message):
        scale(gm)


def test_a_graph_over_several_devices_is_refused() -> None:
    gm = joint_graph(lambda x, y: (x * 2, y * 3), leaf(2), torch.randn(2, device="meta", requires_grad=True))
    with pytest.raises(PassError, match=r"tangents_2 \(placeholder\) is on meta, the loss scale on cpu"):
        scale(gm)
