"""Rules with a phase decide forward, dgrad and wgrad apart, on a bare graph and through the whole compiler."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import mpcompile
from mpcompile.joint_pass import _mark_backward
from mpcompile.passes import Policy, run_passes
from mpcompile.passes.gradient_role import gradient_roles
from mpcompile.passes.graph import MARK, is_backward, is_joint
from mpcompile.passes.marks import Mark, read_marks, write_marks
from tests.helpers import Net, calls, joint, operand_dtypes, relative_error
from tests.test_programs import mixprec

X = torch.randn(5, 8)
ALL = {"forward", "dgrad", "wgrad"}
PHASED = {"": ALL, "@forward": {"forward"}, "@dgrad": {"dgrad"}, "@wgrad": {"wgrad"}, "@backward": {"dgrad", "wgrad"}}


class Middle(nn.Module):
    """Three layers, of which the middle one has a forward, a dgrad and a wgrad."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 6), nn.Linear(6, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


def kept(model: nn.Module, *inputs: Any, **options: Any) -> dict[str, str]:
    """What the middle layer keeps in fp32, with the reason; everything else must run low."""
    report = mpcompile.explain(model, *inputs, options={"dtype": "bf16", **options})
    ((before, _),) = report.modules
    roles = {node.name: role for node, role in gradient_roles(before.graph).items()}
    in_fp32 = [node for node in report.matmuls() if set(node.inputs) == {"float32"}]
    assert {node.module for node in in_fp32} <= {"middle"}
    assert {roles[node.name] for node in report.matmuls() if node.module == "middle"} == ALL
    return {roles[node.name]: node.reason for node in in_fp32}


@pytest.mark.parametrize("suffix", PHASED)
@pytest.mark.parametrize("rule", ["middle", "param:middle.weight"])
def test_rules_of_the_model_decide_their_phase_alone(rule: str, suffix: str) -> None:
    found = kept(Middle(), X, fp32=[rule + suffix])
    assert found.keys() == PHASED[suffix]
    for role, reason in found.items():
        assert f"rule '{rule}{suffix}'" in reason
        assert reason.endswith(f", here {role}") is bool(suffix)


@pytest.mark.parametrize("suffix", PHASED)
@pytest.mark.parametrize("op", ["mm", "*mm"])
def test_operator_rules_decide_their_phase_alone_on_a_bare_graph(op: str, suffix: str) -> None:
    gm = joint(Net(), X.clone().requires_grad_())
    run_passes(gm, Policy(fp32=(f"op:{op}{suffix}",)))
    roles = gradient_roles(gm.graph)
    matmuls = [node for node in calls(gm) if node in roles and node.target._schema.name in ("aten::mm", "aten::addmm")]
    found = {(node.target._schema.name, roles[node]) for node in matmuls if operand_dtypes(node) == {torch.float32}}
    forward = {("aten::addmm", "forward")} if op == "*mm" and "forward" in PHASED[suffix] else set()
    assert found == forward | {("aten::mm", role) for role in PHASED[suffix] - {"forward"}}


def test_operator_rules_by_the_name_in_user_code_reach_backward_in_their_phase() -> None:
    report = mpcompile.explain(Net(), X, options={"dtype": "bf16", "fp32": ["op:linear@wgrad"]})
    in_fp32 = [node for node in report.matmuls() if set(node.inputs) == {"float32"}]
    assert [(node.direction, node.reason) for node in in_fp32] == [
        ("backward", "rule 'op:linear@wgrad', here wgrad")
    ] * 2


def test_several_rules_share_one_operation() -> None:
    found = kept(Middle(), X, fp32=["middle@wgrad", "param:middle.weight@forward"], low=["middle@dgrad"])
    assert found == {
        "wgrad": "rule 'middle@wgrad', here wgrad",
        "forward": "rule 'param:middle.weight@forward', here forward",
    }


def test_fp32_wins_over_low_in_the_phase_both_are_for() -> None:
    assert kept(Middle(), X, fp32=["middle@backward"], low=["mid*"]).keys() == {"dgrad", "wgrad"}


def test_a_low_rule_takes_its_phase_and_leaves_the_rest_to_the_class() -> None:
    report = mpcompile.explain(Middle(), X, options={"dtype": "bf16", "low": ["op:relu@forward"]})
    decided = [(node.direction, node.rule) for node in report.nodes if node.rule == "low rule"]
    assert decided == []  # relu moves or selects: there is nothing to compute low

    report = mpcompile.explain(lambda x: x.tanh() * 2, X.clone().requires_grad_(), options={"dtype": "bf16"})
    assert {node.precision for node in report.nodes} == {"as traced"}
    for phase in ("forward", "backward"):
        options = {"dtype": "bf16", "low": [f"op:tanh@{phase}"]}
        report = mpcompile.explain(lambda x: x.tanh() * 2, X.clone().requires_grad_(), options=options)
        assert {node.direction for node in report.nodes if node.precision == "low"} == {phase}


def test_a_region_of_the_user_wins_in_every_phase() -> None:
    class Island(Middle):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                x = self.middle(self.first(x).relu())
            return self.last(x.relu())

    report = mpcompile.explain(Island(), X, options={"dtype": "bf16", "low": ["middle@dgrad"]})
    inside = [node for node in report.matmuls() if node.module in ("first", "middle")]
    assert {node.rule for node in inside} == {"user"}


@pytest.mark.parametrize(("phase", "low"), [("forward", False), ("wgrad", True), ("dgrad", True)])
def test_a_convolution_s_backward_that_makes_both_gradients_is_covered_by_either_phase(phase: str, low: bool) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3))
    report = mpcompile.explain(model, torch.randn(1, 2, 7, 7), options={"dtype": "bf16", "fp32": [f"1@{phase}"]})
    found = {node.direction: set(node.inputs) for node in report.matmuls() if node.module == "1"}
    assert found["forward"] == ({"bfloat16"} if low else {"float32"})
    assert found["backward"] == ({"float32"} if low else {"bfloat16"})


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_attention_is_kept_in_its_phase_though_its_kernel_is_chosen_before(phase: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v)

    rule = f"op:scaled_dot_product_attention@{phase}"
    report = mpcompile.explain(Attention(), torch.randn(2, 5, 8), options={"dtype": "bf16", "fp32": [rule]})
    attention = {node.direction: node for node in report.matmuls() if "scaled_dot" in node.op}
    assert attention.keys() == {"forward", "backward"}
    assert "bfloat16" not in attention[phase].inputs
    assert rule in attention[phase].reason
    (other,) = attention.keys() - {phase}
    assert "bfloat16" in attention[other].inputs


@pytest.mark.parametrize(("phase", "exact"), [("forward", False), ("wgrad", True)])
def test_a_weight_gradient_in_fp32_is_that_of_its_operands(phase: str, exact: bool) -> None:
    model = Middle()
    mixprec(model, fp32=[f"middle@{phase}", "first", "last"])(X).square().sum().backward()
    truth = Middle().double()
    truth.load_state_dict(model.state_dict())
    truth(X.double()).square().sum().backward()
    # All else in fp32, so the bias gradient of the last layer knows of the forward alone.
    error = relative_error(model.last.bias.grad, truth.last.bias.grad)
    assert (error > 1e-5) is exact  # forward of the middle layer in bf16, or not
    assert error < 2.0**-6


def test_a_rule_with_a_phase_that_matches_nothing_raises() -> None:
    with pytest.raises(Exception, match="Rule 'midle@dgrad' matches no module; the nearest names are: 'middle'"):
        mpcompile.explain(Middle(), X, options={"dtype": "bf16", "fp32": ["midle@dgrad"]})
    gm = joint(Net(), X)
    with pytest.raises(ValueError, match="Rule 'frist@dgrad' matches no module"):
        run_passes(gm, Policy(fp32=("frist@dgrad",)))


def test_backward_bodies_of_higher_order_ops_are_backward() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.yes, self.no = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda v: self.yes(v).relu(), lambda v: self.no(v).tanh(), (x * 1,))

    options = {"dtype": "bf16", "fp32": ["op:*mm@backward"]}
    report = mpcompile.explain(Branch(), X.clone().requires_grad_(), options=options)
    backward = [node for node in report.matmuls() if node.direction == "backward"]
    assert backward
    assert {kind for node in backward for kind in node.inputs} == {"float32"}
    forward = [node for node in report.matmuls() if node.direction == "forward"]
    assert forward
    assert {kind for node in forward for kind in node.inputs} == {"bfloat16"}


def test_a_body_that_backward_calls_is_backward_where_autograd_does_not_say_so() -> None:
    """torch 2.11 leaves what such a body computes again of forward without a tag."""
    inner = fx.Graph()
    inner.output((inner.call_function(torch.ops.aten.relu.default, (inner.placeholder("v"),)),))
    graph = fx.Graph()
    x, body = graph.placeholder("x"), graph.get_attr("body")
    call = graph.call_function(torch.ops.higher_order.cond, (True, body, body, (x,)))
    graph.output((call,))
    gm = fx.GraphModule({"body": fx.GraphModule(nn.Module(), inner)}, graph)
    (relu,) = calls(gm.body)
    _mark_backward(gm.graph)
    assert not is_backward(relu)
    call.meta["partitioner_tag"] = "is_backward"
    _mark_backward(gm.graph)
    assert is_backward(relu)
    assert not is_joint(gm.body.graph)


def test_marks_are_read_as_they_were_written() -> None:
    node = calls(joint(Net(), X))[0]
    marks = [Mark("fp32", "fp32 rule", "rule 'a | b@dgrad'", "dgrad"), Mark("low", "low rule", "rule 'c'")]
    write_marks(node, marks)
    assert read_marks(node) == marks
    assert isinstance(node.meta["custom"][MARK], str)  # autograd copies it, and cache keys hold it


def test_no_marks_leave_a_node_as_it_is() -> None:
    node = calls(joint(Net(), X))[0]
    before = dict(node.meta)
    write_marks(node, [])
    assert node.meta == before
    assert read_marks(node) == []
