"""The report tells the truth about each operation and cast, as data that survives a round trip."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import mpcompile
from mpcompile.inspection.report import CastRecord, NodeRecord, Report
from mpcompile.inspection.snapshot import snapshot
from tests.helpers import trace
from tests.test_programs import mixprec


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.last(x.relu())


LAST_LINE = f"{Path(__file__)}:{Net.forward.__code__.co_firstlineno + 2}"


@pytest.fixture
def report() -> Report:
    compiled = mixprec(Net(), fp32=["last"])
    compiled(torch.randn(5, 8)).sum().backward()
    (report,) = mpcompile.reports(compiled)
    return report


def only(nodes: tuple[NodeRecord, ...], **fields: str) -> NodeRecord:
    (node,) = (n for n in nodes if all(getattr(n, name) == value for name, value in fields.items()))
    return node


def test_a_low_matmul(report: Report) -> None:
    node = only(report.nodes, op="aten.addmm.default", module="first")
    assert node.inputs == ("bfloat16",) * 3
    assert node.output == "bfloat16"
    assert (node.op_class, node.precision, node.rule) == ("low", "low", "class")
    assert node.reason == "matmul, convolution or attention"
    assert node.direction == "forward"


def test_a_ruled_matmul_and_its_backward(report: Report) -> None:
    forward = only(report.nodes, op="aten.addmm.default", module="last")
    assert forward.inputs == ("float32",) * 3
    assert (forward.op_class, forward.precision, forward.rule, forward.reason) == (
        "low",
        "fp32",
        "fp32 rule",
        "rule 'last'",
    )
    backward = [node for node in report.matmuls() if node.direction == "backward" and node.module == "last"]
    assert [node.op for node in backward] == ["aten.mm.default", "aten.mm.default"]
    assert {(node.precision, node.rule, node.inputs) for node in backward} == {
        ("fp32", "fp32 rule", ("float32", "float32"))
    }


def test_a_decomposed_norm_is_named_as_the_model_called_it(report: Report) -> None:
    node = only(report.nodes, op="aten.var_mean.correction")
    assert node.user_op == "aten.native_layer_norm.default"
    assert (node.op_class, node.precision, node.module) == ("fp32", "as traced", "norm")
    assert node.output == "float32"


def test_source_lines_are_those_of_the_model(report: Report) -> None:
    for node in report.nodes:
        if node.module == "last":
            assert node.source == LAST_LINE, node
        assert node.source.startswith(str(Path(__file__))), node


def test_a_bias_gradient_is_an_fp32_sum_of_its_module(report: Report) -> None:
    sums = [n for n in report.nodes if n.op.startswith("aten.sum") and n.module == "first"]
    assert [(n.direction, n.inputs, n.op_class) for n in sums] == [("backward", ("float32",), "fp32")]


def test_matmuls_are_the_operations_that_may_run_low(report: Report) -> None:
    assert [node.op.split(".")[1] for node in report.matmuls()] == ["addmm", "addmm", "mm", "mm", "mm"]


def cast_of(casts: tuple[CastRecord, ...], parameter: str) -> CastRecord:
    (cast,) = (cast for cast in casts if cast.parameter == parameter)
    return cast


def test_casts_of_parameters_say_which_and_how_many_bytes(report: Report) -> None:
    weight = cast_of(report.casts, "first.weight")
    assert (weight.before, weight.after, weight.bytes) == ("float32", "bfloat16", 8 * 16 * (4 + 2))
    assert cast_of(report.casts, "first.bias").bytes == 16 * (4 + 2)
    assert not [cast for cast in report.casts if cast.parameter.startswith(("last", "norm"))]


def test_casts_are_those_of_the_graph(report: Report) -> None:
    names = {cast.name for cast in report.casts}
    assert len(names) == len(report.casts)
    (graph,) = report.graphs
    assert all(f"{name}: " in graph.after and f"{name}: " not in graph.before for name in names)
    widened = only(report.nodes, op="aten.addmm.default", module="first").name
    (wide,) = (cast for cast in report.casts if cast.value == widened)
    assert (wide.before, wide.after, wide.bytes) == ("bfloat16", "float32", 5 * 16 * (2 + 4))


def test_bytes_of_a_dynamic_shape_are_unknown() -> None:
    compiled = mixprec(Net(), dynamic=True)
    compiled(torch.randn(5, 8))
    (report,) = mpcompile.reports(compiled)
    (activation,) = (cast for cast in report.casts if cast.value == "addmm")
    assert activation.bytes is None
    assert cast_of(report.casts, "first.weight").bytes == 8 * 16 * (4 + 2)


def test_text_before_and_after_has_dtypes_and_directions(report: Report) -> None:
    (graph,) = report.graphs
    assert "bf16" not in graph.before
    assert "addmm: f32[5, 16] = aten.addmm.default(" in graph.before
    assert "addmm: bf16[5, 16] = aten.addmm.default(" in graph.after
    assert graph.before.splitlines().count("# backward") == 1
    forward, _, backward = graph.before.partition("# backward\n")
    assert "addmm" in forward
    assert "sum" in backward


def test_the_graphs_are_there_as_fx_and_run(report: Report) -> None:
    ((before, after),) = report.modules
    assert isinstance(before, fx.GraphModule)
    names = {node.name for node in after.graph.nodes} - {node.name for node in before.graph.nodes}
    assert {cast.name for cast in report.casts} <= names


def test_every_pass_gives_its_account(report: Report) -> None:
    (graph,) = report.graphs
    names = [result.name for result in graph.results]
    assert names[:2] == ["read_intent", "lower_kernels"]
    assert "insert_casts" in names
    (change,) = graph.results[0].changes
    assert (change.op, change.after, change.reason) == ("linear", "fp32", "rule 'last'")


def test_json_round_trip(report: Report) -> None:
    again = Report.from_json(report.to_json())
    assert again == report
    assert again.to_json() == report.to_json()
    assert again.modules == ()
    assert str(again) == str(report)
    assert again.summary() == report.summary()


def test_a_report_of_other_nodes_is_not_equal(report: Report) -> None:
    text = report.to_json()
    assert Report.from_json(text.replace('"fp32 rule"', '"user"', 1)) != report


def test_an_inference_graph_has_no_backward() -> None:
    compiled = mixprec(Net())
    with torch.no_grad():
        compiled(torch.randn(5, 8))
    (report,) = mpcompile.reports(compiled)
    assert {node.direction for node in report.nodes} == {"forward"}
    assert "# backward" not in report.graphs[0].before


def test_a_snapshot_does_not_change_with_the_graph() -> None:
    gm = trace(lambda x: x.sin().cos(), torch.randn(3))
    copy = snapshot(gm)
    text = str(copy.graph)
    (cos,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    cos.target = torch.ops.aten.tan.default
    cos.meta["val"] = None
    assert str(copy.graph) == text
    assert all(node.meta["val"] is not None for node in copy.graph.nodes if node.op == "call_function")


def test_a_snapshot_generates_no_code_until_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, x = trace(lambda x: x.sin().cos(), torch.randn(3)), torch.randn(3)
    with monkeypatch.context() as patch:
        patch.setattr(fx.Graph, "python_code", lambda *_, **__: pytest.fail("code was generated"))
        copy = snapshot(gm)
    assert torch.equal(copy(x), x.sin().cos())


def test_an_operation_that_could_not_run_low_says_why() -> None:
    @torch.library.custom_op("mpcompile_test::columns_if_low", mutates_args=())
    def columns_if_low(x: Tensor) -> Tensor:
        return x.t().contiguous().t() if x.dtype is torch.bfloat16 else x.clone()

    columns_if_low.register_fake(lambda x: x.t().contiguous().t() if x.dtype is torch.bfloat16 else x.clone())
    mpcompile.register_op(columns_if_low, "low")
    compiled, x = mixprec(lambda x: columns_if_low(x) + 1), torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(compiled(x), x + 1)
    node = only(mpcompile.reports(compiled)[0].nodes, op="mpcompile_test.columns_if_low.default")
    assert (node.precision, node.inputs) == ("fp32", ("float32",))
    assert node.reason == "the low kernel lays out its result differently"
