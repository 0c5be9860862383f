"""The plan: what each operation computes in, and the rule that decided."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from mpcompile.passes import Decision, Policy, plan_compute, run_passes
from mpcompile.passes.compute_plan import require_matches
from mpcompile.passes.graph import MARK, is_backward
from tests.helpers import call, calls, dtypes, joint, text, trace

BF16 = Policy()
A, B = torch.randn(4, 4), torch.randn(4, 4)


def planned(gm: fx.GraphModule, policy: Policy = BF16) -> dict[str, Decision]:
    """The decisions by node name."""
    return {node.name: decision for node, decision in plan_compute(gm, policy).items()}


def decision(fn: Callable[..., Any], *inputs: torch.Tensor, op: str = "mm") -> Decision:
    """The decision for the only call of ``op``."""
    gm = trace(fn, *inputs)
    return plan_compute(gm, BF16)[call(gm, op)]


def test_plan_decides_every_operation_and_changes_nothing() -> None:
    gm = trace(lambda x, w: torch.softmax(torch.relu(x @ w), -1).sum(), A, B)
    before = text(gm)
    plan = plan_compute(gm, BF16)
    assert list(plan) == calls(gm)
    assert text(gm) == before
    assert [d.precision for d in plan.values()] == ["low", *["as traced"] * 3]
    assert {d.rule for d in plan.values()} == {"class"}


def test_reasons_name_the_class() -> None:
    gm = trace(lambda x, w: ((x @ w).exp() * 2).permute(1, 0), A, B)
    reasons = {name: d.reason for name, d in planned(gm).items()}
    assert reasons["mm"] == "matmul, convolution or attention"
    assert "reductions, normalisations, losses" in reasons["exp"]
    assert "elementwise" in reasons["mul"]
    assert "moves or selects" in reasons["permute"]


def test_fp32_policy_decides_nothing() -> None:
    plan = planned(trace(torch.mm, A, B), Policy(dtype=torch.float32))
    assert [(d.precision, d.rule) for d in plan.values()] == [("as traced", "policy")]


LOW_CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "mm": (torch.mm, (A, B)),
    "bmm": (torch.bmm, (A[None], B[None])),
    "addmm": (torch.addmm, (A, A, B)),
    "baddbmm": (torch.baddbmm, (A[None], A[None], B[None])),
    "addbmm": (torch.addbmm, (A, A[None], B[None])),
    "mv": (torch.mv, (A, B[0])),
    "addmv": (torch.addmv, (A[0], A, B[0])),
    "convolution": (F.conv1d, (torch.randn(1, 2, 5), torch.randn(3, 2, 2))),
    "_trilinear": (F.bilinear, (A, B, torch.randn(2, 4, 4))),
    "_scaled_dot_product_flash_attention_for_cpu": (
        F.scaled_dot_product_attention,
        (A[None, None], B[None, None], B[None, None]),
    ),
}


@pytest.mark.parametrize("op", LOW_CALLS)
def test_products_are_planned_low(op: str) -> None:
    fn, inputs = LOW_CALLS[op]
    found = decision(fn, *inputs, op=op)
    assert (found.precision, found.rule) == ("low", "class")


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        (torch.float64, "operands are float64"),
        (torch.int64, "operands are not floating-point"),
        (torch.complex64, "operands are not floating-point"),
    ],
)
def test_other_dtypes_are_left_as_traced(dtype: torch.dtype, reason: str) -> None:
    assert decision(torch.mm, A.to(dtype), B.to(dtype)) == Decision("as traced", "shape", reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_low_already_is_left_as_traced(dtype: torch.dtype) -> None:
    found = decision(torch.mm, A.to(dtype), B.to(dtype))
    assert (found.precision, found.reason[:7]) == ("as traced", "already")


def test_contraction_of_size_one_stays_fp32() -> None:
    found = decision(torch.mm, A[:, :1], B[:1])
    assert (found.precision, found.rule) == ("fp32", "shape")
    assert "contraction of size 1" in found.reason
    assert decision(torch.mm, A[:, :2], B[:2]).precision == "low"
    assert decision(torch.addmm, A, A[:, :1], B[:1], op="addmm").precision == "fp32"


def test_constants_alone_stay_fp32() -> None:
    def rotary(x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(4.0)[:, None].expand(4, 4)
        return x * torch.mm(positions, positions).cos()

    found = decision(rotary, A)
    assert (found.precision, found.rule) == ("fp32", "shape")
    assert "constants alone" in found.reason
    assert decision(lambda x: torch.mm(torch.ones(4, 4), x), A).precision == "low"


def test_integer_inputs_count_as_constants() -> None:
    index = torch.arange(4)
    found = decision(lambda i: torch.outer(i.float(), i.float()) @ torch.ones(4, 4), index)
    assert "constants alone" in found.reason


RANKED: dict[str, Callable[[torch.Tensor], Any]] = {
    "argmin": lambda d: d.argmin(1),
    "argmin of a distance": lambda d: (d * -2 + 1).sqrt().argmin(1),
    "topk": lambda d: d.topk(2)[1],
    "sort": lambda d: d.sort()[1],
    "comparison": lambda d: d > 0,
    "comparison through a view": lambda d: d.view(16) > 0,
    "two of them": lambda d: (d.argmax(1), d < 1),
}


@pytest.mark.parametrize("ranking", RANKED)
def test_results_that_are_only_ranked_stay_fp32(ranking: str) -> None:
    found = decision(lambda x, w: RANKED[ranking](x @ w), A, B)
    assert (found.precision, found.rule) == ("fp32", "shape")
    assert "only compared or ranked" in found.reason


@pytest.mark.parametrize(
    "reader", [lambda d: (d.argmin(1), d), lambda d: (d.argmin(1), d.relu()), lambda d: torch.bmm(d[None], d[None])]
)
def test_results_that_are_read_as_well_compute_low(reader: Callable[..., Any]) -> None:
    gm = trace(lambda x, w: reader(x @ w), A, B)
    assert planned(gm)["mm"].precision == "low"


def test_pieces_that_nobody_reads_rank_nothing() -> None:
    gm = trace(lambda x, w: ((x @ w).split(2), x.relu())[1], A, B)
    assert planned(gm)["mm"].precision == "low"


def test_training_decides_a_ranked_matmul_as_evaluation_does() -> None:
    def quantise(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return codes[(x @ codes.t()).argmin(1)] * x

    gm = joint(quantise, A.clone().requires_grad_(), B.clone().requires_grad_())
    matmuls = [node for node in calls(gm, "mm") if not is_backward(node)]
    assert [plan_compute(gm, BF16)[node].precision for node in matmuls] == ["fp32"]


def test_dynamic_sizes_do_not_decide() -> None:
    gm = joint(lambda x, w: x @ w, A.clone().requires_grad_(), B.clone().requires_grad_(), dynamic=True)
    assert [planned(gm)[node.name].precision for node in calls(gm, "mm")] == ["low"] * 3


def test_kernels_chosen_for_fp32_keep_it() -> None:
    q = torch.randn(1, 1, 4, 8)

    def efficient(q: torch.Tensor) -> Any:
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True)[0]

    found = decision(efficient, q.to("meta"), op="_scaled_dot_product_efficient_attention")
    assert (found.precision, found.reason[:17]) == ("fp32", "kernel was chosen")


def test_mark_of_the_user_decides_before_every_rule() -> None:
    gm = trace(torch.mm, A, B)
    call(gm, "mm").meta["custom"] = {MARK: "fp32|user|inside a | region"}
    found = planned(gm, Policy(low=("op:mm",)))["mm"]
    assert found == Decision("fp32", "user", "inside a | region")


class Model(nn.Module):
    """Two linear layers in a list, a softmax, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x).softmax(-1)


def matmuls_at(gm: fx.GraphModule, policy: Policy, precision: str) -> tuple[int, int]:
    """How many forward and backward products have a precision decided by a rule."""
    found = [n for n, d in plan_compute(gm, policy).items() if (d.precision, d.rule[-4:]) == (precision, "rule")]
    products = [node for node in found if node.target in PRODUCTS]
    backward = sum(map(is_backward, products))
    return len(products) - backward, backward


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@pytest.fixture
def model_graph() -> fx.GraphModule:
    return joint(Model(), torch.randn(3, 4, requires_grad=True))


def test_module_rule_covers_backward_too(model_graph: fx.GraphModule) -> None:
    assert matmuls_at(model_graph, Policy(fp32=("layers.1",)), "fp32") == (1, 2)
    assert matmuls_at(model_graph, Policy(fp32=("layers.*",)), "fp32") == (2, 4)
    assert matmuls_at(model_graph, Policy(fp32=("layers",)), "fp32") == (2, 4)
    assert matmuls_at(model_graph, Policy(fp32=("*",)), "fp32") == (3, 6)


def test_module_rule_is_carried_out_forward_and_backward(model_graph: fx.GraphModule) -> None:
    run_passes(model_graph, Policy(fp32=("head",)))
    of_head = [n for n in calls(model_graph) if n.target in PRODUCTS and n.meta["val"].shape[-1] == 2]
    assert [n.meta["val"].dtype for n in of_head] == [torch.float32]
    found = [dtypes(model_graph)[n.name][0] for n in calls(model_graph) if n.target in PRODUCTS]
    assert (found.count(torch.float32), found.count(torch.bfloat16)) == (3, 6)


def test_operator_rule_covers_the_operator_the_user_called(model_graph: fx.GraphModule) -> None:
    plan = plan_compute(model_graph, Policy(low=("op:softmax",)))
    ruled = [node for node, d in plan.items() if d.rule == "low rule"]
    assert {node.name for node in ruled if not is_backward(node)} >= {"exp", "sub", "div"}
    assert any(map(is_backward, ruled))
    assert {plan[node].reason for node in ruled} == {"rule 'op:softmax'"}


def test_operator_rule_keeps_matmuls_fp32(model_graph: fx.GraphModule) -> None:
    assert matmuls_at(model_graph, Policy(fp32=("op:addmm",)), "fp32")[0] == 2
    assert matmuls_at(model_graph, Policy(fp32=("op:*mm",)), "fp32") == (3, 6)


def test_parameter_rule_covers_what_reads_the_parameter(model_graph: fx.GraphModule) -> None:
    assert matmuls_at(model_graph, Policy(fp32=("param:head.weight",)), "fp32") == (1, 1)
    assert matmuls_at(model_graph, Policy(fp32=("param:layers.0.weight",)), "fp32") == (1, 1)
    assert matmuls_at(model_graph, Policy(fp32=("param:*.bias",)), "fp32") == (2, 0)


def test_fp32_rule_wins_over_low_rule(model_graph: fx.GraphModule) -> None:
    policy = Policy(fp32=("head",), low=("op:*mm",))
    assert matmuls_at(model_graph, policy, "fp32") == (1, 2)
    assert matmuls_at(model_graph, policy, "low") == (2, 4)


def test_low_rule_wins_over_the_class() -> None:
    gm = trace(lambda x, w: (torch.mm(x[:, :1], w[:1]), x.sum(), x.t(), x.int() + 1), A, B)
    plan = planned(gm, Policy(low=("op:mm", "op:sum", "op:t", "op:add")))
    assert (plan["mm"].precision, plan["sum_1"].precision) == ("low", "low")
    # moving elements has no precision, and integers are no floats
    assert (plan["t"].rule, plan["add"].rule) == ("class", "shape")


@pytest.mark.parametrize(
    ("rule", "noun", "near"),
    [
        ("layer.0", "module", "layers.0"),
        ("haed", "module", "head"),
        ("param:head.wieght", "parameter", "head.weight"),
    ],
)
def test_rule_that_matches_nothing_raises(model_graph: fx.GraphModule, rule: str, noun: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"Rule '{rule}' matches no {noun}.*'{near}'"):
        run_passes(model_graph, Policy(fp32=(rule,)))


def test_operator_rule_may_match_nothing_in_one_graph(model_graph: fx.GraphModule) -> None:
    require_matches(model_graph, Policy(low=("op:bmm",)))
    assert matmuls_at(model_graph, Policy(low=("op:bmm",)), "low") == (0, 0)
