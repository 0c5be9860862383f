"""What a user asks for is what computes: islands, requests, rules, their order, and the errors for rules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.func import functional_call, grad, vmap

import mpcompile
from benchmarks.models import RMSNorm
from mpcompile.inspection.report import NodeRecord
from tests.test_programs import error, matmuls, mixprec


class Two(nn.Module):
    """Two linear layers, the second called by ``second`` in a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.a(x).relu())

    def second(self, x: Tensor) -> Tensor:
        return self.b(x)


class Island(Two):
    def second(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.b(x)


class IslandElsewhere(Two):
    def second(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return self.b(x)


class BothRequested(Two):
    def second(self, x: Tensor) -> Tensor:
        return x.float().unsqueeze(0) @ self.b.weight.to(torch.float32).t()


class OneRequested(Two):
    def second(self, x: Tensor) -> Tensor:
        return x.float() @ self.b.weight.t()


class Normed(Two):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(8)

    def second(self, x: Tensor) -> Tensor:
        return self.b(self.norm(x))


class Attending(Two):
    def second(self, x: Tensor) -> Tensor:
        return self.b(x).softmax(-1) @ self.b.weight


def trained(model: nn.Module, size: int = 8, **options: Any) -> list[NodeRecord]:
    """The matmuls of a model after one step, of all its graphs."""
    compiled = mixprec(model, **options)
    compiled(torch.randn(4, size)).sum().backward()
    return matmuls(compiled)


def precisions(nodes: list[NodeRecord], module: str) -> set[tuple[str, str]]:
    """(direction, precision) of the matmuls of a module."""
    return {(node.direction, node.precision) for node in nodes if node.module == module}


LOW = {("forward", "low"), ("backward", "low")}
FP32 = {("forward", "fp32"), ("backward", "fp32")}


def only_reason(nodes: list[NodeRecord]) -> tuple[str, str]:
    """Rule and reason of the matmuls that stay in fp32."""
    (reason,) = {(node.rule, node.reason) for node in nodes if node.precision == "fp32"}
    return reason


def test_an_island_is_fp32_forward_and_backward_and_the_report_says_why() -> None:
    nodes = trained(Island())
    assert precisions(nodes, "a") == LOW
    assert precisions(nodes, "b") == FP32
    assert only_reason(nodes) == ("user", "inside autocast(enabled=False)")
    assert {dtype for node in nodes if node.module == "b" for dtype in node.inputs} == {"float32"}


def test_an_island_computes_what_fp32_computes() -> None:
    def island(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ w

    x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    assert torch.equal(mixprec(island)(x, w), x @ w)


def test_an_island_of_another_device_has_no_effect() -> None:
    nodes = trained(IslandElsewhere())
    assert precisions(nodes, "a") == precisions(nodes, "b") == LOW


def test_a_matmul_with_every_operand_requested_stays_fp32_through_views() -> None:
    nodes = trained(BothRequested())
    assert precisions(nodes, "a") == LOW
    assert precisions(nodes, "") == FP32
    assert only_reason(nodes) == ("user", "every operand was explicitly asked for in float32")


def test_a_request_on_one_operand_does_not_pin() -> None:
    assert precisions(trained(OneRequested()), "") == LOW


def test_a_linear_after_a_norm_that_widens_runs_low() -> None:
    nodes = trained(Normed())
    assert precisions(nodes, "a") == precisions(nodes, "b") == LOW


@pytest.mark.parametrize("rule", ["b", "param:b.weight", "param:b.*"])
def test_an_fp32_rule_covers_forward_and_backward(rule: str) -> None:
    nodes = trained(Two(), fp32=[rule])
    assert precisions(nodes, "a") == LOW
    assert precisions(nodes, "b") == FP32
    assert only_reason(nodes) == ("fp32 rule", f"rule '{rule}'")


def test_an_op_rule_covers_every_call_of_the_op_and_its_backward() -> None:
    nodes = trained(Attending(), fp32=["op:linear"])
    assert precisions(nodes, "a") == precisions(nodes, "b") == FP32
    assert precisions(nodes, "") == LOW


@pytest.mark.parametrize("rule", ["op:softmax", "1"])
def test_a_low_rule_lowers_what_is_fp32_by_class(rule: str) -> None:
    compiled = mixprec(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), low=[rule])
    compiled(torch.randn(4, 8)).square().sum().backward()
    decided = {node.op for node in mpcompile.reports(compiled)[0].nodes if node.rule == "low rule"}
    assert {op for op in decided if "exp" in op}, decided


@pytest.mark.parametrize(
    ("model", "module", "options", "expected"),
    [
        (Island, "b", {"low": ["b"]}, ("user", "fp32")),
        (BothRequested, "", {"low": ["op:matmul"]}, ("user", "fp32")),
        (Two, "b", {"fp32": ["b"], "low": ["op:linear"]}, ("fp32 rule", "fp32")),
        (Attending, "b", {"fp32": ["op:linear"], "low": ["b"]}, ("fp32 rule", "fp32")),
        (Two, "b", {"low": ["b"]}, ("low rule", "low")),
        (Two, "b", {}, ("class", "low")),
    ],
)
def test_precedence(
    model: Callable[[], nn.Module], module: str, options: dict[str, Any], expected: tuple[str, str]
) -> None:
    nodes = [node for node in trained(model(), **options) if node.module == module]
    assert {(node.rule, node.precision) for node in nodes} == {expected}


def test_a_module_pattern_covers_what_is_inside_and_nothing_beside() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Two(), Two()])
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    nodes = trained(Deep(), fp32=["layers.1"])
    assert precisions(nodes, "layers.1.a") == precisions(nodes, "layers.1.b") == FP32
    assert precisions(nodes, "layers.0.a") == precisions(nodes, "head") == LOW
    nodes = trained(Deep(), fp32=["layers.*.b"])
    assert precisions(nodes, "layers.0.b") == precisions(nodes, "layers.1.b") == FP32
    assert precisions(nodes, "layers.0.a") == precisions(nodes, "layers.1.a") == LOW


class Broken(nn.Module):
    """Breaks the graph inside a submodule, and again while a submodule waits to be called."""

    class Inner(Two):
        def second(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return self.b(x) @ self.b.weight

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.skip, self.out = self.Inner(), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x) + self.skip(x))


def test_paths_are_from_the_root_in_every_graph() -> None:
    model = mixprec(Broken())
    model(torch.randn(4, 8)).sum().backward()
    assert len(mpcompile.reports(model)) > 2
    assert {node.module for node in matmuls(model)} == {"inner.a", "inner.b", "inner", "skip", "out"}
    parameters = {cast.parameter for report in mpcompile.reports(model) for cast in report.casts}
    assert parameters >= {"inner.a.weight", "inner.b.weight", "skip.weight", "out.weight"}


@pytest.mark.parametrize("rule", ["inner.a", "inner.b", "skip", "out"])
@pytest.mark.parametrize("spelled", ["{}", "param:{}.weight"])
@pytest.mark.filterwarnings("ignore:No operation of this graph computes in 16 bits")
def test_rules_hold_across_graph_breaks(rule: str, spelled: str) -> None:
    nodes = trained(Broken(), fp32=[spelled.format(rule)])
    for module in {"inner.a", "inner.b", "skip", "out"}:
        assert precisions(nodes, module) == (FP32 if module == rule else LOW), module


UNMATCHED = [
    ({"fp32": ["c"]}, r"Rule 'c' matches no module; the nearest names are: 'a', 'b'"),
    ({"low": ["param:b.weigth"]}, r"Rule 'param:b.weigth' matches no parameter; .* 'b.weight'"),
    ({"fp32": ["op:sofmax"]}, r"Rule 'op:sofmax' matches no operator; .*'softmax'"),
    ({"fp32": ["a"], "low": ["a"]}, "is in both `fp32` and `low`; keep one"),
]


@pytest.mark.parametrize(("options", "message"), UNMATCHED)
def test_rules_that_match_nothing_or_contradict_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        trained(Two(), **options)
    assert isinstance(caught.value.inner_exception, ValueError)


def test_rules_on_a_plain_function_are_checked_against_its_graph() -> None:
    with pytest.raises(BackendCompilerFailed, match="Rule 'layers' matches no module"):
        mixprec(torch.nn.functional.relu, fp32=["layers"])(torch.randn(3))


class Rotary(nn.Module):
    """Angles by a matmul of positions with a buffer of frequencies, contracted over more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(2, 8))
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(2 * x.shape[0], dtype=x.dtype).view(-1, 2) * 1000.5
        return self.project(x) * (positions @ self.frequencies).cos()


def test_a_matmul_of_positions_and_frequencies_stays_fp32() -> None:
    model = Rotary()
    nodes = trained(model)
    assert precisions(nodes, "project") == LOW
    assert precisions(nodes, "") == {("forward", "fp32")}
    assert only_reason(nodes) == ("shape", "no operand depends on a parameter or needs a gradient")
    x, exact = torch.randn(4, 8), Rotary().double()
    exact.load_state_dict(model.state_dict())
    # The angles reach thousands: in bf16 they would be off by several radians.
    assert error([mixprec(model)(x).detach()], [exact(x.double()).detach()]) < 0.01


def test_frozen_parameters_count_as_parameters() -> None:
    compiled = mixprec(Two().requires_grad_(False))
    compiled(torch.randn(4, 8))
    assert {(node.module, node.precision) for node in matmuls(compiled)} == {("a", "low"), ("b", "low")}


def test_matmuls_of_gradients_taken_inside_are_low() -> None:
    model, x = Two(), torch.randn(4, 8)
    parameters = dict(model.named_parameters())

    def per_sample(p: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        def loss(p: dict[str, Tensor], row: Tensor) -> Tensor:
            return functional_call(model, p, (row[None],)).square().sum()

        return vmap(grad(loss), (None, 0))(p, rows)

    compiled = mixprec(per_sample)
    with torch.no_grad():
        found = compiled(parameters, x)
    assert len(matmuls(compiled)) >= 3
    assert {node.precision for node in matmuls(compiled)} == {"low"}
    exact = {name: value.detach().double() for name, value in parameters.items()}
    truth = per_sample(exact, x.double())
    assert error([found[name] for name in exact], [truth[name] for name in exact]) < 0.02
